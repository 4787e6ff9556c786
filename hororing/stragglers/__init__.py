"""Slow ranks: make them on purpose, find them, and predict what they cost.

No framework is needed, and each module works without the others.
"""

from hororing.stragglers.hosts import host_names
from hororing.stragglers.injection import StragglerInjector

__all__ = ["StragglerInjector", "host_names"]
