"""Horovod's exceptions. All but the last two are those of `hororing.errors`."""

from __future__ import annotations

from hororing.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text for a framework other than the one that hororing was built for."""
    return (
        f"built for {name} {version}, but {name} {installed_version} is installed; "
        f"build it again, or install {name}=={version}"
    )


class HorovodVersionMismatchError(ImportError):
    """The framework is not the one built for. Never raised: no framework is built against."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> tuple[object, ...]:
        """Keep all three when the exception is pickled."""
        return type(self), (self.name, self.version, self.installed_version)
