"""Examples at full size: each one learns, and `--help` of all works.

Push tier: 3 s in the session of torch, mostly to import scikit-learn. Full tier: 4 minutes.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import mpirun
import numpy as np
import pytest
import session
import tiers

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if "main()" in path.read_text()]
# Their imports take long, and some are optional.
SLOW = re.compile(r"^(?:import|from) (accelerate|keras|lightning|tensorflow|transformers)\b", re.M)


def check_help(script: Path) -> None:
    """Check that `--help` works and explains every option."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(script), "--help"]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        contextlib.redirect_stdout(said),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    doc = ast.get_docstring(ast.parse(script.read_text()))
    assert doc is not None
    shown = re.sub(r"\s+", " ", said.getvalue())
    assert doc.partition("\n")[0] in shown, f"{script.name}: {shown}"
    options = re.findall(r'add_argument\(\s*"(--[\w-]+)"', script.read_text())
    assert [name for name in options if name not in shown] == []


def case_help() -> None:
    import hororing.torch as hvd

    hvd.init()
    quick = [script for script in SCRIPTS if not SLOW.search(script.read_text())]
    assert len(quick) > 5
    for script in quick[hvd.rank() :: hvd.size()]:
        check_help(script)


test_case = session.on_ranks(globals(), 3, session="torch")


@tiers.full
@pytest.mark.parametrize("script", [x for x in SCRIPTS if SLOW.search(x.read_text())], ids=str)
def test_help_of_those_that_import_more(script: Path) -> None:
    for name in SLOW.findall(script.read_text()):
        pytest.importorskip(name)
    check_help(script)


def run(name: str, size: int, *args: str) -> str:
    """Return rank 0's output in lines; the others must print nothing."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    job = mpirun.run(EXAMPLES / name, size, *args, timeout_s=220, environment=quiet)
    assert job.returncode == 0, job.report()
    if "tensorflow" not in name:
        assert job.outputs[1:] == [""] * (size - 1), job.report()
    return job.outputs[0].replace("\r", "\n")


@tiers.full
@pytest.mark.parametrize(
    ("framework", "options"),
    [
        ("torch", ["--fp16-allreduce"]),
        ("torch", ["--use-adasum"]),
        ("tensorflow", ["--fp16-allreduce", "--use-adasum"]),
    ],
)
def test_synthetic_benchmarks_print_images_per_second(framework: str, options: list[str]) -> None:
    pytest.importorskip(framework)
    said = run(
        f"{framework}_synthetic_benchmark.py", 2, *options,
        "--batch-size", "2", "--image-size", "64",
        "--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "3",
    )  # fmt: skip
    assert re.search(r"(?i)^resnet50, 2 images per step on each of 2 CPU\(s\)$", said, re.M)
    assert re.search(r"measure: 100%.* 3/3 ", said)
    ((each, _),) = re.findall(r"^Img/sec per CPU: ([\d.]+) \+-([\d.]+)$", said, re.M)
    ((both, _),) = re.findall(r"^Total img/sec on 2 CPU\(s\): ([\d.]+) \+-([\d.]+)$", said, re.M)
    assert float(each) > 0
    assert float(both) == pytest.approx(2 * float(each), abs=0.2)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Write images of noise in a colour per class: 96 for training, 33 for validation."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(1)
    for part, count in (("train", 32), ("val", 11)):
        for channel, name in enumerate(["blue", "green", "red"]):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 120, (40 + number, 50, 3))
                pixels[..., 2 - channel] += 100
                image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return tmp_path


@tiers.full
def test_images_in_folders_are_learned_and_the_training_goes_on_with_fewer_ranks(
    images: Path,
) -> None:
    args = [
        "--train-dir", str(images / "train"), "--val-dir", str(images / "val"),
        "--checkpoint-format", str(images / "{epoch}.pt"), "--model", "resnet18",
        "--image-size", "32", "--batch-size", "4", "--workers", "1", "--warmup-epochs", "1",
    ]  # fmt: skip
    first = run("torch_imagenet.py", 2, *args, "--epochs", "2", "--batches-per-allreduce", "2")
    assert re.findall(r"^epoch (\d): loss", first, re.M) == ["1", "2"]
    assert re.search(r"epoch 2: 100%.* 6/6 ", first)
    second = run("torch_imagenet.py", 1, *args, "--epochs", "4", "--fp16-allreduce")
    assert re.findall(r"^epoch (\d): loss", second, re.M) == ["3", "4"]
    (accuracy,) = re.findall(r"^epoch 4: .* validation accuracy ([\d.]+)$", second, re.M)
    assert float(accuracy) >= 0.9, first + second


@tiers.full
def test_a_gan_makes_digits_that_can_be_read() -> None:
    said = run("torch_gan.py", 2)
    (read,) = re.findall(r"^([\d.]+) of the made digits are read as asked, 2 ranks$", said, re.M)
    assert float(read) >= 0.85, said


@tiers.full
def test_a_language_model_guesses_masked_bytes() -> None:
    said = run(
        "torch_masked_language_model.py", 2, "--steps", "300", "--length", "64", "--width", "96",
        "--layers", "2", "--lr", "0.003", "--warmup-steps", "20",
    )  # fmt: skip
    found = re.findall(r"^test loss ([\d.]+) after 300 steps on 2 ranks$", said, re.M)
    # A model that knows only the frequency of each byte gets 3.14.
    assert float(found[0]) < 2.6, said
    assert re.search(r"^--- seen\n[^-]*_", said, re.M), said
