"""Records of runs: configuration and results, in files that survive a kill.

No framework is needed, and nothing beside NumPy; other trackers are used where they are installed.
"""

from hororing.toolkit.tracking.adapters import MLflow, TensorBoard, Tracker, WeightsAndBiases
from hororing.toolkit.tracking.comparison import Comparison, compare
from hororing.toolkit.tracking.read import Metric, Run, read_run
from hororing.toolkit.tracking.record import RunRecord

__all__ = [
    "Comparison",
    "MLflow",
    "Metric",
    "Run",
    "RunRecord",
    "TensorBoard",
    "Tracker",
    "WeightsAndBiases",
    "compare",
    "read_run",
]
