"""In tests, CPU tensors stand for tensors on a GPU: hororing.torch takes all of them for such.

tests/fake_gpu, which the C++ tests build, replaces the libraries of NVIDIA. A rank that does not
wait for the fake's streams reads old data, or that of a freed tensor. The knobs CUDA_LIBRARY and
NCCL_LIBRARY name the fake; nothing else in hororing knows about it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAKE = Path(__file__).parents[3] / "build" / "editable" / "libfake_gpu.so"
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_begun: list[Any] = []  # keeps the work of streams alive
_captured = [False]  # whether torch's stream is captured into a graph


def path() -> Path | None:
    """Return the path of the fake, or None if it is not built."""
    return FAKE if FAKE.exists() else None


def environment(fake: Path, **more: str) -> dict[str, str]:
    """Return the variables of a job with the fake."""
    return {
        "HORORING_CUDA_LIBRARY": str(fake),
        "HORORING_NCCL_LIBRARY": str(fake),
        "FAKE_GPU": str(fake),
        **more,
    }


@functools.cache
def library() -> ctypes.CDLL:
    """Load the fake in a rank of such a job."""
    fake = ctypes.CDLL(os.environ["FAKE_GPU"])
    fake.fake_gpu_synchronize.argtypes = [ctypes.c_void_p]
    fake.fake_gpu_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    fake.fake_gpu_count.argtypes = [ctypes.c_char_p]
    fake.fake_gpu_count.restype = ctypes.c_int64
    fake.fake_gpu_hang_in.argtypes = [ctypes.c_char_p, ctypes.c_int]
    fake.fake_gpu_stream.restype = ctypes.c_void_p
    fake.fake_gpu_run.argtypes = [ctypes.c_void_p, _WORK, ctypes.c_void_p]
    return fake


def set_(name: str, value: int) -> None:
    """See fake_gpu.h."""
    assert library().fake_gpu_set(name.encode(), value) == 0, name


def hang_in(function: str) -> None:
    """See fake_gpu.h; on every thread."""
    library().fake_gpu_hang_in(function.encode(), -1)


def capture(begins: bool) -> None:
    """Begin or end the capture of all streams."""
    _captured[0] = begins
    set_("capturing", int(begins))


def count(what: str) -> int:
    """See fake_gpu.h."""
    return int(library().fake_gpu_count(what.encode()))


def new_stream() -> int:
    """Return a new stream of the framework."""
    return int(library().fake_gpu_stream())


def run_in(stream: int, work: Callable[[], object]) -> None:
    """Add work to a stream, which runs it late."""
    _begun.append(_WORK(lambda _: work()))
    library().fake_gpu_run(stream, _begun[-1], None)


def synchronize(stream: int) -> None:
    """Wait for all work in a stream."""
    library().fake_gpu_synchronize(stream)


def violations() -> str:
    """Return the first call that broke the rules of CUDA or NCCL, or ""."""
    first = ctypes.c_char_p()
    library().fake_gpu_violations(ctypes.byref(first))
    return (first.value or b"").decode()


def stand_in() -> None:
    """From now on, make hororing.torch of this process take all tensors for GPU tensors."""
    import torch

    from hororing._requests import handles, persistent
    from hororing.torch._optimizer import reducer
    from hororing.torch._tensor.adapter import TorchAdapter
    from hororing.torch._tensor.verbs import verbs

    own = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("LOCAL_RANK", "0")))

    class OnFakeGpu(TorchAdapter):
        def __init__(self) -> None:
            self.plain_tensors = handles.plain_tensors((), self.plain)  # no tensor is plain

        def device(self, tensor: Any) -> int:
            return own

        def stream(self, device: int) -> int:
            assert device == own
            return 0

        def plain(self, tensor: Any) -> None:
            return None

        def plain_like(self, tensor: Any) -> None:
            return None

    verbs.adapter = OnFakeGpu()
    torch.cuda.is_current_stream_capturing = lambda: _captured[0]
    set_("delay_us", 20)

    # torch computes on the host, not in the stream that has been told to wait, so here the host
    # waits instead of the stream.
    def then_synchronize(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            library().fake_gpu_synchronize(None)
            return result

        return call

    for module, names in (
        (handles, ("wait_in_stream", "move")),
        (persistent, ("wait_in_stream",)),
        (reducer, ("finish_many",)),
    ):
        for name in names:
            setattr(module, name, then_synchronize(getattr(module, name)))
