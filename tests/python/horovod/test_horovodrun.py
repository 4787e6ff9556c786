"""The command horovodrun, and completion in shells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hororing import __main__
from hororing.as_horovod import horovodrun

MODULE = ["-m", "hororing.as_horovod"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("python train.py -m x", ["python", *MODULE, "train.py", "-m", "x"]),
        ("/usr/bin/python3.11 -uO train.py", ["/usr/bin/python3.11", "-uO", *MODULE, "train.py"]),
        ("python -X dev -Wignore -m a.b -c", ["python", "-X", "dev", "-Wignore", *MODULE, "-m",
                                              "a.b", "-c"]),
        ("python -c pass", ["python", *MODULE, "-c", "pass"]),
        ("./train.py 1", [sys.executable, *MODULE, "./train.py", "1"]),
        ("python -m hororing.as_horovod a.py", ["python", "-m", "hororing.as_horovod", "a.py"]),
        ("", []),
    ],
)  # fmt: skip
def test_the_script_runs_with_the_alias(words: str, wanted: list[str]):
    assert horovodrun.with_alias(words.split()) == wanted


def test_a_program_that_is_not_python_is_told_what_to_do(capsys: pytest.CaptureFixture[str]):
    assert horovodrun.with_alias(["sh", "run.sh"]) == ["sh", "run.sh"]
    assert "python -m hororing.as_horovod" in capsys.readouterr().err


def test_flags_may_be_abbreviated_but_the_programs_are_its_own(tmp_path: Path):
    given = ["--num-p", "2", "--timeline-file=a", "--no-tag", "x", "--num-p", "1"]
    wanted = ["--num-proc", "2", "--timeline-filename=a", "--no-tag-output", "x", "--num-p", "1"]
    assert horovodrun.expanded(given) == wanted
    assert horovodrun.expanded(["--auto", "x"]) == ["--auto", "x"]  # of several: an error
    script = tmp_path / "script.py"
    script.write_text("import horovod.torch, sys; print(horovod.torch.__name__, sys.argv[1:])")
    code = "import sys; from hororing.as_horovod.horovodrun import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--num-p", "1", "python", str(script), "--a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "hororing.torch ['--a']\n", done.stderr


def test_hororun_names_the_command_for_scripts_of_horovod():
    command = [sys.executable, "-m", "hororing.hororun", "-np", "1", sys.executable, "-c"]
    done = subprocess.run(
        [*command, "import horovod.torch"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert "imports horovod runs under horovodrun" in done.stderr.splitlines()[-1]


def test_shells_complete_flags_and_commands(capsys: pytest.CaptureFixture[str]):
    assert __main__.main(["completion", "fish"]) == 0
    assert "complete -c hororing" in capsys.readouterr().out
    assert __main__.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, wanted in (
        ("hororun --prog", "--progress"), ("hororing doc", "doctor"),
        ("hororing doctor --ev", "--events"), ("horovodrun --timeline-f", "--timeline-filename"),
    ):  # fmt: skip
        typed = words.split()
        ask = (
            f"COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _hororun {typed[0]}; "
            'echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", script + ask], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == f"{wanted}\n", done.stderr
