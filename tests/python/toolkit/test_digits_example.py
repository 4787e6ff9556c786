"""The examples learn digits; torch_digits.py takes the same steps on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import mpirun
import pytest
import tiers

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE = EXAMPLES / "torch_digits.py"
LAST_LINE = re.compile(r"^test accuracy (\d\.\d+) after (\d+) steps on (\d+) ranks$", re.MULTILINE)


def run(size: int, *args: str, example: Path = EXAMPLE) -> mpirun.Job:
    job = mpirun.run(example, size, *args, timeout_s=110, environment={"TF_CPP_MIN_LOG_LEVEL": "2"})
    assert job.returncode == 0, job.report()
    return job


@tiers.full
@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_classifies_97_of_100_images(size: int):
    job = run(size)
    ((accuracy, steps, ranks),) = LAST_LINE.findall(job.outputs[0])
    assert float(accuracy) >= 0.97, job.report()
    assert int(ranks) == size
    # Twenty epochs over 1,438 images: N ranks take an N-th of the steps.
    assert int(steps) == 20 * (1438 // (32 * size))
    # Only rank 0 prints, and shows its progress to the end.
    assert re.search(rf"train: 100%.* {steps}/{steps} ", job.outputs[0])
    assert job.outputs[1:] == [""] * (size - 1), job.report()


def losses(size: int, batch: int, steps: int, directory: Path) -> list[float]:
    file = directory / f"loss{size}"
    run(
        size, "--float64", "--steps", str(steps), "--batch-size", str(batch // size),
        "--loss-log", str(file),
    )  # fmt: skip
    return [float(line) for line in file.read_text().split()]


@tiers.full
def test_two_ranks_with_half_the_batch_take_the_steps_of_one(tmp_path: Path):
    steps = 50  # with 64 images each, two epochs and the beginning of a third
    alone = losses(1, 64, steps, tmp_path)
    together = losses(2, 64, steps, tmp_path)
    assert len(alone) == steps
    assert together == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < 0.6 * alone[0]  # it learns, so equality is meaningful


@tiers.full
def test_a_loop_of_tensorflow_classifies_97_of_100_images():
    pytest.importorskip("tensorflow")
    job = run(2, example=EXAMPLES / "tensorflow_digits.py")
    ((accuracy, steps, ranks),) = LAST_LINE.findall(job.outputs[0])
    assert float(accuracy) >= 0.97, job.report()
    assert (int(steps), int(ranks)) == (20 * (1438 // 64), 2)
    assert re.search(rf"train: 100%.* {steps}/{steps} ", job.outputs[0])
    assert "test accuracy" not in job.outputs[1]


@tiers.full
def test_a_loop_of_jax_classifies_97_of_100_images():
    pytest.importorskip("optax")
    pytest.importorskip("flax")
    job = run(2, "--accuracy", "0.97", example=EXAMPLES / "jax_digits.py")
    ((_, steps, ranks),) = LAST_LINE.findall(job.outputs[0])
    assert (int(steps), int(ranks)) == (20 * (1438 // 64), 2)
    assert "test accuracy" not in job.outputs[1]


@tiers.full
def test_keras_classifies_97_of_100_images_also_after_a_restart(tmp_path: Path):
    pytest.importorskip("tensorflow")
    file = str(tmp_path / "last.keras")
    first = run(2, "--checkpoint", file, "--epochs", "3", example=EXAMPLES / "keras_digits.py")
    ((before, steps, _),) = LAST_LINE.findall(first.outputs[0])
    assert int(steps) == 3 * (1438 // 64)
    second = run(2, "--checkpoint", file, "--resume", example=EXAMPLES / "keras_digits.py")
    ((after, steps, ranks),) = LAST_LINE.findall(second.outputs[0])
    assert float(after) >= 0.97, second.report()
    assert float(after) > float(before)
    assert (int(steps), int(ranks)) == (20 * (1438 // 64), 2)  # the first run made three of them
    epochs = re.findall(r"^Epoch (\d+)/20", second.outputs[0], re.MULTILINE)
    assert [int(epoch) for epoch in epochs] == list(range(4, 21))
    assert "Epoch" not in second.outputs[1]


@tiers.full
@pytest.mark.parametrize("name", ["large_batch_digits.py", "large_batch_digits_keras.py"])
def test_large_batches_learn_in_a_few_epochs(name: str):
    options = ["--epochs", "12", "--batch-size", "90", "--warmup-epochs", "2"]
    job = run(2, *options, example=EXAMPLES / name)
    assert "effective batch 180, peak rate 0.3516" in job.outputs[0], job.report()
    ((accuracy, steps, ranks),) = LAST_LINE.findall(job.outputs[0])
    assert float(accuracy) >= 0.95, job.report()
    # 719 images per rank; Keras uses the incomplete batch of an epoch, too.
    assert (int(steps), int(ranks)) == (12 * (8 if "keras" in name else 7), 2)
    assert "test accuracy" not in job.outputs[1]


@pytest.mark.parametrize(
    "name",
    [
        "torch_digits.py", "tensorflow_digits.py", "keras_digits.py", "jax_digits.py",
        "large_batch_digits.py", "large_batch_digits_keras.py",
    ],
)  # fmt: skip
def test_the_distributed_lines_are_marked_and_few(name: str):
    lines = (EXAMPLES / name).read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    marked = [line for line in code if line.endswith("# hvd")]
    assert all(line in marked for line in code if "hvd." in line and "print(" not in line)
    assert len(marked) <= 20
