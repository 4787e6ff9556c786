"""Many trials side by side, on process sets of one job (docs/tracking.md).

`search` is the call; rank 0 hands out trials (hub.py), each rank carries them out (worker.py).
"""

from hororing.toolkit.search.call import SearchResult, search
from hororing.toolkit.search.trial import Outcome, Trial
from hororing.toolkit.tracking.sweep import Range, StopEarly

__all__ = ["Outcome", "Range", "SearchResult", "StopEarly", "Trial", "search"]
