"""Slow ranks: inject them, find them, and predict their cost.

No framework is needed, and each module works without the others.
"""

from hororing.toolkit.stragglers.arrivals import Collective, Recording, read_timeline
from hororing.toolkit.stragglers.diagnosis import Diagnosis, RankReport, diagnose
from hororing.toolkit.stragglers.injection import StragglerInjector
from hororing.toolkit.stragglers.simulator import replay
from hororing.toolkit.stragglers.watch import StragglerWatch

__all__ = [
    "Collective",
    "Diagnosis",
    "RankReport",
    "Recording",
    "StragglerInjector",
    "StragglerWatch",
    "diagnose",
    "read_timeline",
    "replay",
]
