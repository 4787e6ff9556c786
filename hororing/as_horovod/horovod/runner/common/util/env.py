"""Where this process stands, by the variables of its launcher: known before `init`."""

from hororing import launch


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size as the launcher tells; 0 and 1 without one."""
    launched = launch.detect()
    return launched.rank or 0, launched.min_size
