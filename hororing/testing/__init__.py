"""Tests on several ranks, in milliseconds each; for users, on pytest or without it.

With hororing installed, pytest knows a mark::

    @pytest.mark.ranks(4)
    def test_loss_gradient(): ...  # runs on every rank; hvd and torch.distributed are initialised

`run` does the same for a function. Nothing else of hororing imports this package, and only its
modules items, plugin, reports and session import pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hororing.testing.checks import assert_same as assert_same
    from hororing.testing.checks import raises_on as raises_on
    from hororing.testing.faults import interleave as interleave
    from hororing.testing.faults import kill as kill
    from hororing.testing.faults import slow as slow
    from hororing.testing.function import run as run
else:

    def __getattr__(name: str) -> object:
        """Load what a test uses: pytest imports this package in every session."""
        import importlib

        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)


_MODULES = {
    "assert_same": "checks", "interleave": "faults", "kill": "faults", "raises_on": "checks",
    "run": "function", "slow": "faults",
}  # fmt: skip
__all__ = ["assert_same", "interleave", "kill", "raises_on", "run", "slow"]
