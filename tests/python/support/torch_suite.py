"""Run the distributed tests that PyTorch ships, over one backend, on forked ranks.

    python tests/python/support/torch_suite.py --backend hororing --ranks 3 [--words send recv]

prints a line of JSON for each test: its name, "passed", "failed" or "skipped", and the reason. Many
tests require a backend of a certain name: `--as gloo` and `--as mpi` choose those for these names,
but run them over `--backend`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
from typing import Any

# Time limits of a test and of a collective; PyTorch's are minutes.
TEST_S = 60
CALL_S = 20


def load(backend: str, pretended: str, ranks: int) -> Any:
    """Return the class of tests for a backend with the name `pretended`."""
    os.environ.update(
        BACKEND=pretended,
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_S),
        INIT_METHOD=f"file://{tempfile.mkdtemp()}/store",
    )
    import torch
    import torch.distributed as dist

    import hororing.torch_backend

    hororing.torch_backend.register()
    if pretended == "mpi":
        dist.is_mpi_available = lambda: True
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    for override in common_distributed.TIMEOUT_OVERRIDE:
        common_distributed.TIMEOUT_OVERRIDE[override] = 2 * TEST_S
    # The tests read these. Those of groups require 8 ranks, except for MPI, but use two.
    os.environ["BACKEND"] = "mpi" if ranks > 2 else backend
    distributed_test.BACKEND = Name(backend)
    Name.pretended = pretended
    distributed_test.default_pg_timeout = CALL_S
    torch.set_num_threads(1)

    class TestBackend(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:
            super().setUp()
            self._fork_processes()

        def _fork_processes(self) -> None:
            import torch.multiprocessing

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestBackend


class Name(str):
    """The name of a backend that is also equal to a second name."""

    pretended = ""

    def __eq__(self, other: object) -> bool:
        return other in (str(self), self.pretended)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.pretended)


class Result(unittest.TestResult):
    """Prints the outcome of each test."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.began = time.monotonic()

    def tell(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        took = round(time.monotonic() - self.began, 1)
        name = test.id().rsplit(".", 1)[-1]
        print(json.dumps({"name": name, "outcome": outcome, "s": took, "why": why}), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.tell(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.tell(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.tell(test, "failed", str(err[1]))

    addFailure = addError  # noqa: N815


def main() -> None:
    """Run the tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="hororing")
    parser.add_argument("--as", dest="pretended", default="gloo")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--words", nargs="*", default=[""])
    told = parser.parse_args()
    tests = load(told.backend, told.pretended, told.ranks)
    names = unittest.TestLoader().getTestCaseNames(tests)
    chosen = [name for name in names if any(word in name for word in told.words)]
    out = sys.stdout
    unittest.TestSuite(tests(name) for name in chosen).run(Result(out))


if __name__ == "__main__":
    main()
