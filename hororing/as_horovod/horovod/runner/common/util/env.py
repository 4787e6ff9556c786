"""Rank and size by the variables of the launcher, even before `init`."""

from hororing._job import launchers


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the launcher's rank and size; 0 and 1 without one."""
    launched = launchers.detect()
    return launched.rank or 0, launched.min_size
