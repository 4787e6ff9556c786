"""What notices that a job is wrong: replicas that differ, and gradients that are not finite.

This is the half without a framework. `options` are what a user chooses, `comparison` what ranks
exchange, `findings` what is said about it, `watch` puts them together. The adapters have the other
half, which knows the tensors: hororing/torch/guard.py and its like. docs/guard.md is for users.

Only those files and `exports` of an adapter import it; nothing else depends on it.
"""

from __future__ import annotations

from hororing.guard.findings import Finding
from hororing.guard.options import Options
from hororing.guard.watch import Watch

__all__ = ["Finding", "Options", "Watch"]
