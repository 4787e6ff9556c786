"""What a recorded training would do on more ranks and another network (docs/scheduling.md).

``python -m hororing predict TIMELINE --ranks 8,64,256 --network 25Gbit`` is the command.
"""

from hororing.toolkit.predict.network import Network
from hororing.toolkit.predict.profile import Profile, read_profile
from hororing.toolkit.predict.report import Prediction, predict

__all__ = ["Network", "Prediction", "Profile", "predict", "read_profile"]
