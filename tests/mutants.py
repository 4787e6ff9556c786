"""Seeded faults: whether the push tier of the tests notices them, and which test does.

    python tests/mutants.py [NAME...]

copies the tree into build/mutants/source, builds it there, and runs the tests of the chosen faults,
which must pass. Then, for each fault (all, or those named), it seeds the fault, builds, runs the
fault's tests, which must fail, and removes the fault. It prints the test that noticed each. A fault
that does not compile, or makes a C++ test hang, counts as not caught.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build/mutants/source"
LIMIT_S = 120  # per C++ test file; pyproject.toml has pytest's limit
NO_ASLR = ["setarch", "-R"] if shutil.which("setarch") else []


class Fault(NamedTuple):
    """`tests` is a C++ test file, "tsan" and such a file, or "pytest" and its arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: str


OPTIMIZER = "pytest test_torch_optimizer.py -k 3"

FAULTS = [
    Fault("the last elements of a sum are lost", "csrc/kernels/reduce_kernels.inc",
          "sum = Combined<Op, In>(sum, BeginRest<In>(scaling, sources, source, at, left));",
          "sum = Combined<Op, In>(sum, BeginRest<In>(scaling, sources, source, at, left - 1));",
          "reduce_test"),
    Fault("bfloat16 is cut instead of rounded", "csrc/kernels/half.h",
          "const Bits rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);",
          "const Bits rounded = bits;", "half_test"),
    Fault("a ring receives where it has not combined yet", "csrc/collective/ring_allreduce.cc",
          "return scratch_ + number % kAhead * segment_;",
          "return scratch_ + number % 2 * segment_;", "collective_test"),
    Fault("a ring's average is not divided", "csrc/collective/ring_allreduce.cc",
          "FinishPartial(layout_, span, size_,", "FinishPartial(layout_, span, 1,",
          "collective_test"),
    Fault("uneven chunks begin where even ones would", "csrc/collective/segments.h",
          "return {i * each + std::min(i, larger),", "return {i * each,", "collective_test"),
    Fault("an alltoall keeps the wrong rows", "csrc/collective/alltoall.cc",
          "from + sends[rank].begin, sends[rank].size);",
          "from + receives[rank].begin, sends[rank].size);", "exchange_test"),
    Fault("Adasum's square is of the wrong vector", "csrc/collective/adasum.cc",
          "bb[lane] += y * y;", "bb[lane] += x * x;", "adasum_test"),
    Fault("a host counts twice", "csrc/collective/slice_exchange.cc",
          "for (int host = 2; host < hosts(); ++host) Combine",
          "for (int host = 1; host < hosts(); ++host) Combine", "hierarchical_test"),
    Fault("a fused tensor is unpacked from a wrong place", "csrc/backend/host_backend.cc",
          "from += RoundUp(bytes, kCacheLine);", "from += bytes;", "backend_test"),
    Fault("rank 0 is always the root", "csrc/backend/host_moves.cc",
          "const bool is_root = transport_.rank() == batch.root;\n  size_t total",
          "const bool is_root = transport_.rank() == 0;\n  size_t total", "backend_others_test"),
    Fault("a tensor is summed as one of the type before it", "csrc/collective/layout.cc",
          "if (!runs_.empty() && runs_.back().spec == spec) {",
          "if (!runs_.empty()) {", "collective_test"),
    Fault("all ranks gather as many rows as the first", "csrc/negotiation/coordinator.cc",
          "rows.push_back(request->tensors[tensor].shape[0]);",
          "rows.push_back(requests[0]->tensors[tensor].shape[0] + 0 * request->root);",
          "engine_test"),
    Fault("a cached request outlives its shape", "csrc/engine/tensor_table.cc",
          "return record.id != 0 && record.agreed == request ? record.id : 0;", "return record.id;",
          "engine_test"),
    Fault("a joined rank is counted twice", "csrc/negotiation/join_and_process_sets.cc",
          "JoinedAmong(pending).size() == pending.reported.size();",
          "static_cast<size_t>(joined_count_) >= pending.reported.size();",
          "membership_test"),
    Fault("only rank 0 gets a mismatch", "csrc/engine/applier.cc",
          "Complete(entry->handle, decision.details().status, {});",
          "Complete(entry->handle, world_.topology.rank == 0 ? decision.details().status"
          " : Status::Ok(), {});", "engine_test"),
    Fault("a rank that shuts down announces no reason", "csrc/negotiation/coordinator.cc",
          "Push({Decision::Kind::kLeave, Status(failed ? Code::kPeerLost : Code::kShutDown, text, "
          "rank)});", "", "negotiation_test"),
    Fault("a waiting rank is not woken", "csrc/engine/handle_table.cc",
          "if (slot->awaited) completed_.notify_all();", "", "engine_test"),
    Fault("a handle is released twice", "csrc/engine/handle_table.cc",
          "if (slot == nullptr || slot->released) return false;\n  if (slot->done) {",
          "if (slot == nullptr) return false;\n  if (slot->done) {", "engine_test"),
    Fault("a killed process is not noticed", "csrc/transport/shm/liveness.cc",
          "return state.attached.load() != kDetached;", "return false;", "transport_test"),
    Fault("shared memory stays behind", "csrc/transport/shm/segment.cc",
          "  shm_unlink(name_.c_str());\n  close(std", "  close(std", "transport_test"),
    Fault("the timeline is not closed", "csrc/trace/writer.cc",
          "status = WriteAt(kTail, tail_);", "", "trace_test"),
    Fault("the engine takes requests without the lock", "csrc/engine/tensor_table.cc",
          "  submitted->clear();\n  std::lock_guard<std::mutex> lock(mutex_);\n",
          "  submitted->clear();\n", "tsan engine_test"),
    Fault("handles are made without the lock", "csrc/engine/handle_table.cc",
          "size_t count, bool done) {\n  std::lock_guard<std::mutex> lock(mutex_);",
          "size_t count, bool done) {", "tsan engine_test"),
    Fault("the optimizer does not wait", "hororing/torch/_optimizer/reducer.py",
          "            complete = finish_many(step.pending)\n", "            complete = True\n",
          OPTIMIZER),
    Fault("a gradient that no hook has sent is forgotten", "hororing/torch/_optimizer/reducer.py",
          "late = [entry for entry in self.follow() if entry[1].state != SENT]", "late = []",
          OPTIMIZER),
    Fault("gradients are sent one backward pass too early", "hororing/torch/_optimizer/gradient.py",
          "return self.fires_once and step.is_last", "return self.fires_once",
          OPTIMIZER),
    Fault("a group is sent in the order of arrival", "hororing/torch/_optimizer/routes.py",
          "order = sorted(self._waiting)", "order = list(self._waiting)", OPTIMIZER),
    Fault("compressed gradients all have the same weight", "hororing/torch/_optimizer/weights.py",
          "return weight * len(self._members.ranks) / total", "return 1.0",
          "pytest test_torch_compression.py -k 3"),
    Fault("the predivide factor is lost", "hororing/_adapters/optimizer_options.py",
          "return 1.0 / self.predivide, self.predivide", "return 1.0 / self.predivide, 1.0",
          OPTIMIZER),
    Fault("a batch's variance is biased", "hororing/torch/sync_batch_norm.py",
          "statistics[2] / (statistics[0] - 1)", "statistics[2] / statistics[0]",
          "pytest test_sync_batch_norm.py -k case_equals"),
    Fault("integer buffers are not broadcast", "hororing/torch/state.py",
          "[verbs.broadcast_async_(tensor, root_rank, name) for name, tensor in named]",
          "[verbs.broadcast_async_(tensor, root_rank, name) for name, tensor in named"
          " if tensor.is_floating_point()]", "pytest test_objects_and_state.py -k parameters"),
    Fault("compressed gradients stay so", "hororing/_requests/compression.py",
          "return tensor if ctx is None else cls.cast(tensor, ctx)", "return tensor",
          "pytest test_tensorflow_training.py -k test_training"),
    Fault("the tape skips the first variable", "hororing/tensorflow/gradients.py",
          "        if gradient is None:\n            continue\n        if keys",
          "        if gradient is None or at == 0:\n            continue\n        if keys",
          "pytest test_tensorflow_training.py -k test_training"),
    Fault("metrics are not averaged", "hororing/_adapters/fit_callbacks.py",
          "means = hvd.allreduce(", "means = (lambda array, **_: array)(",
          "pytest test_keras_torch.py -k metrics"),
    Fault("who is no member of a set is let in", "hororing/_requests/process_sets.py",
          "    if not process_set.included():\n        raise ValueError(\n"
          '            f"{verb}: rank',
          '    if False:\n        raise ValueError(\n            f"{verb}: rank',
          "pytest test_process_sets.py -k on_several_ranks"),
    Fault("an unknown variable is ignored", "hororing/config/__init__.py",
          "    if unknown:\n", "    if False:\n", "pytest test_config.py"),
    Fault("a name of Horovod's is another module", "hororing/as_horovod/names.py",
          '"horovod.torch.functions": "hororing.torch.functions"',
          '"horovod.torch.functions": "hororing.torch.state"',
          "pytest test_as_horovod.py -k module"),
]  # fmt: skip


def run(command: list[str]) -> tuple[int, str]:
    """Return the exit code and the output."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1",
                   "CMAKE_ARGS": "-DHORORING_TESTING=ON",
                   "TSAN_OPTIONS": "halt_on_error=1"}  # fmt: skip
    done = subprocess.run(
        command, cwd=SOURCE, env=environment, check=False, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def must(command: list[str]) -> None:
    """Run a command that is not a test; exit if it fails."""
    code, output = run(command)
    if code != 0:
        sys.exit(f"{output}\n{' '.join(command)}: failed")


def build(tests: str) -> bool:
    """Build what `tests` need, in place or in its own folder; return whether that worked."""
    *kind, name = tests.split()
    if "pytest" in kind:
        return run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"])[0] == 0
    folder = "build/tsan" if kind else "build/editable"
    (program,) = [each.parent.name for each in SOURCE.glob(f"tests/cpp/*/{name}.cc")]
    jobs = os.environ.get("JOBS", "2")
    return (
        run(["cmake", "--build", folder, "--parallel", jobs, "--target", f"{program}_tests"])[0]
        == 0
    )


def failed_test(tests: str) -> str:
    """Return the first test that fails, or ""."""
    kind, *words = tests.split()
    if kind == "pytest":
        code, output = run([sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider",
                            f"tests/python/{words[0]}", *words[1:]])  # fmt: skip
        found = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py\S*)", output, re.MULTILINE)
    else:
        name = words[0] if words else kind
        ctest = ["timeout", str(LIMIT_S), "ctest", "-V", "--no-tests=error", "-R", f"^{name}$",
                 "--test-dir", "build/tsan" if words else "build/editable"]  # fmt: skip
        code, output = run([*(NO_ASLR if words else []), *ctest])
        if code == 124:  # it hangs, and its watchdog does not report that
            return ""
        found = re.search(r"FAILED (\w+)$", output, re.MULTILINE)
        started = re.findall(r"^\d+: (\w+) \.\.\.$", output, re.MULTILINE)
        if found is None and started:  # the report of a sanitizer, or a crash
            race = " (data race)" if "ThreadSanitizer" in output else ""
            return f"{name}: {started[-1]}{race}" if code else ""
        if found is not None:
            return f"{name}: {found[1]}"
    if code == 0:
        return ""
    return found[1].rstrip(":") if found else f"{tests} (no test named)"


def main(names: list[str]) -> int:
    """Return the number of chosen faults that are not caught."""
    chosen = [each for each in FAULTS if not names or each.name in names]
    stale = [each for each in chosen if (ROOT / each.file).read_text().count(each.old) != 1]
    if stale or not chosen:
        sys.exit(
            "\n".join(f"stale: {each.name} ({each.file})" for each in stale) or "no such fault"
        )
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True,
                            text=True).stdout  # fmt: skip
    files = set(filter(None, listed.split("\0")))
    for room in ("csrc", "tests", "hororing"):  # remove files that no longer exist
        for place in (SOURCE / room).rglob("*.*"):
            if (
                place.is_file()
                and place.suffix != ".so"
                and str(place.relative_to(SOURCE)) not in files
            ):
                place.unlink()
    for file in files:
        place, text = SOURCE / file, (ROOT / file).read_bytes()
        if not place.exists() or place.read_bytes() != text:  # else make rebuilds it
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, place)
    must([sys.executable, "setup.py", "-q", "build_ext", "--inplace"])
    if any(each.tests.startswith("tsan") for each in chosen):
        must(["cmake", "--preset", "tsan"])
    for tests in dict.fromkeys(each.tests for each in chosen):
        if not build(tests):
            sys.exit(f"{tests}: cannot be built")
        if failed := failed_test(tests):
            sys.exit(f"{tests}: fails without a fault, in {failed}")
    missed = 0
    for fault in chosen:
        place = SOURCE / fault.file
        text = place.read_text()
        native = fault.file.startswith("csrc/")
        place.write_text(text.replace(fault.old, fault.new))
        try:
            built = not native or build(fault.tests)
            caught = failed_test(fault.tests) if built else ""
        finally:
            place.write_text(text)
        if native and fault.tests.startswith("pytest"):
            must([sys.executable, "setup.py", "-q", "build_ext", "--inplace"])
        missed += not caught
        caught = re.sub(r"::\w+\[([^\]]*)\]$", r": \1", caught)
        result = f"`{caught}`" if caught else "**nothing**" if built else "**cannot be built**"
        print(f"* {fault.name} (`{fault.file}`):\n  {result}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
