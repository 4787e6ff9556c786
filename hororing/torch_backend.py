"""Where torch finds the backend of `hororing.torch.distributed`: an entry point of torch.backends.

`import torch` calls `register` in every environment where hororing is installed, and must work
where hororing cannot be loaded. So this is no part of the package, and imports nothing but
torch.distributed; the rest comes with the first process group.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

_BACKEND = "hororing"


def register() -> None:
    """Make "hororing" a backend of torch.distributed. Does nothing the second time."""
    dist: Any = importlib.import_module("torch.distributed")
    if not dist.is_available() or hasattr(dist.Backend, _BACKEND.upper()):
        return
    dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu"])
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.register_rendezvous_handler(_BACKEND, _meet)
    # There is no public way to add to "env://", which is what init_process_group uses by default,
    # and mpirun does not set its variables. Where torch has changed, pass
    # init_method="hororing://".
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = _with_mpi(handlers["env"])
    # It refuses every group whose backend is not called gloo.
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    c10d.monitored_barrier = dist.monitored_barrier = _of_group(dist.monitored_barrier)
    # torch 2.15 attaches its flight recorder to groups of backends that do not feed it, but cannot
    # attach it to a group written in Python. hororing has its own.
    attach = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is not None:
        c10d._maybe_attach_flight_recorder = _unless_ours(attach)


def register_as(name: str) -> None:
    """Make `name` a backend of torch.distributed that is hororing's. ValueError if it exists."""
    register()
    dist: Any = importlib.import_module("torch.distributed")
    if not dist.is_available():
        raise ValueError(f"{name}: this build of torch has no torch.distributed")
    if hasattr(dist.Backend, name.upper()):
        raise ValueError(f"torch.distributed has a backend {name!r} already: do not import it here")
    dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    return _implementation().create(options, backend_options)


def _meet(url: str, **options: Any) -> Iterator[Any]:
    yield from _implementation().meet(url, **options)


def _with_mpi(by_variables: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def meet(url: str, **options: Any) -> Iterator[Any]:
        try:
            launchers = importlib.import_module("hororing._job.launchers")
        except ImportError:
            return by_variables(url, **options)
        told = launchers.detect()
        variables = importlib.import_module("hororing.config.environment").variables()
        # Some launchers (accelerate) give an address to mpirun, which then gives no rank.
        complete = variables.get("MASTER_ADDR") and ("RANK" in variables or "rank=" in url)
        if told.launched and told.mpi and not complete:
            return _meet(url, **options)
        return by_variables(url, **options)

    return meet


def _of_group(monitored_barrier: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(monitored_barrier)
    def call(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        asked = importlib.import_module("torch.distributed").group.WORLD if group is None else group
        if _is_ours(asked):
            asked.monitored_barrier(timeout, wait_all_ranks)
        else:
            monitored_barrier(group, timeout, wait_all_ranks)

    return call


def _unless_ours(attach: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(attach)
    def call(group: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_ours(group):
            attach(group, *args, **kwargs)

    return call


def _is_ours(group: Any) -> bool:
    return type(group).__module__.startswith("hororing.")


def _implementation() -> Any:
    return importlib.import_module("hororing.torch.distributed.rendezvous")
