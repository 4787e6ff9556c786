"""The one table of knobs: environment variables in, one checked `Config` out.

Every knob is a variable HORORING_<name>. Where Horovod has the same knob, its HOROVOD_* name is
accepted too; ours wins when both are set. An empty variable counts as not set. From `KNOBS` come
parsing, `python -m hororing config`, docs/configuration.md, and the values that all ranks must
share. Defaults are written here only.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hororing import horovod_variables

PREFIX = "HORORING_"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_SIZES = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_SIZES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LEVELS = {"trace": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}
_ALGORITHMS = ("auto", "ring", "recursive_doubling", "three_phase", "leader")


class BadText(Exception):
    """A text is not of the accepted form; `load` says which and where."""


# ---------------------------------------------------------------------------------------------
# Forms of values


@dataclass(frozen=True)
class Form:
    """How a text becomes a value."""

    accepted: str  # ends "expected ..."
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str


def _number(text: str, kind: type, least: float, most: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise BadText from None
    if not (math.isfinite(value) and least <= value <= most):
        raise BadText
    return value


def integer(least: int, most: int) -> Form:
    """Whole numbers of a range."""
    return Form(
        f"a whole number from {least} to {most}", lambda text: _number(text, int, least, most)
    )


def number(least: float, most: float) -> Form:
    """Numbers of a range."""
    return Form(
        f"a number from {least:g} to {most:g}",
        lambda text: _number(text, float, least, most),
        lambda value: f"{value:g}",
    )


def choice(*names: str) -> Form:
    """One of some words."""

    def parse(text: str) -> str:
        if text.lower() not in names:
            raise BadText
        return text.lower()

    return Form("one of " + ", ".join(names), parse)


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise BadText


def _parse_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if found is None or found[2].upper() not in _SIZES:
        raise BadText
    value = float(found[1]) * _SIZES[found[2].upper()]
    if value != int(value) or value > 2**40:
        raise BadText
    return int(value)


def _show_bytes(value: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if value and value % _SIZES[unit.upper()] == 0:
            return f"{value // _SIZES[unit.upper()]}{unit}"
    return str(value)


def _parse_cores(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,5}", part) for part in parts):
        raise BadText
    return tuple(int(part) for part in parts)


def _parse_level(text: str) -> str:
    name = {"warn": "warning", "critical": "fatal"}.get(text.lower(), text.lower())
    if name not in _LEVELS:
        raise BadText
    return name


def _parse_fusion(text: str) -> str | int:
    return text.lower() if text.lower() in ("ready", "plan") else _parse_bytes(text)


def _parse_chunk(text: str) -> int:
    value = _parse_bytes(text)
    if value and not 2**12 <= value <= 2**30:
        raise BadText
    return value


def _parse_algorithms(text: str) -> str:
    names = [name.strip() for name in text.lower().split(",")]
    if len(names) not in (1, 3) or not set(names) <= set(_ALGORITHMS):
        raise BadText
    return ",".join(names)


BOOL = Form(f"one of {', '.join(_TRUE + _FALSE)}", _parse_bool, lambda value: str(int(value)))
BYTES = Form(
    "bytes, as 67108864, 64MiB (1024 * 1024) or 64MB (1000 * 1000), at most 1024GiB",
    _parse_bytes,
    _show_bytes,
)
PATH = Form("a path", str)
CORES = Form(
    "core numbers with commas between them, one for each rank of a host",
    _parse_cores,
    lambda cores: ",".join(map(str, cores)),
)
FUSION = Form(
    f"ready, plan, or {BYTES.accepted}",
    _parse_fusion,
    lambda value: value if isinstance(value, str) else _show_bytes(value),
)
CHUNK = Form("0, or 4KiB to 1GiB", _parse_chunk, _show_bytes)
ALGORITHMS = Form(
    f"one of {', '.join(_ALGORITHMS)}; or three of them with commas between them",
    _parse_algorithms,
)
LEVEL = Form("one of " + ", ".join(_LEVELS), _parse_level)


# ---------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True)
class Alias:
    """Horovod's variable for a knob. `parse` returns None where it asks for the default."""

    name: str
    parse: Callable[[str], Any]
    accepted: str
    note: str = ""


@dataclass(frozen=True)
class Knob:
    """One row."""

    name: str
    form: Form
    default: Any
    help: str
    unit: str = ""
    # Whose value counts: "all" must be equal, which init compares; "rank 0"; or "each" its own.
    scope: str = "each"
    aliases: tuple[Alias, ...] = field(default=())

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name

    def show(self, value: Any) -> str:
        """Text of `value`, which parses back to it."""
        return "" if value is None else self.form.show(value)


def _same(name: str, form: Form) -> Alias:
    return Alias(name, form.parse, form.accepted)


def _horovod_bool(name: str) -> Alias:
    return Alias(name, horovod_variables.is_true, "a whole number")


def _horovod_fusion(text: str) -> int:
    return int(_number(text, int, 0, 2**40))


def _horovod_stall_check(note: str) -> Alias:
    return Alias(
        "HOROVOD_STALL_CHECK_DISABLE",
        lambda text: 0.0 if horovod_variables.is_true(text) else None,
        "a whole number",
        note,
    )


def _horovod_timeline(text: str) -> str | None:
    return None if text.upper() == "DYNAMIC" else text


_SECONDS = number(0, 1e9)
_COUNT = integer(0, 2**31 - 1)

KNOBS: tuple[Knob, ...] = (
    Knob(
        "FUSION",
        FUSION,
        "ready",
        "which tensors are reduced together; ready: what is ready, up to FUSION_BYTES; plan: "
        "buckets that end the step earliest, learned from its first steps; a number of bytes: "
        "ready, with that as FUSION_BYTES",
        scope="all",
    ),
    Knob(
        "FUSION_BYTES",
        BYTES,
        64 * 2**20,
        "most bytes of tensors that are reduced together; 0: each by itself",
        unit="bytes",
        scope="all",
        aliases=(
            Alias(
                "HOROVOD_FUSION_THRESHOLD", _horovod_fusion, "a whole number of bytes up to 2^40"
            ),
        ),
    ),
    Knob(
        "CYCLE_TIME_MS",
        number(0, 1e4),
        1.0,
        "longest that a burst of tensors is held back to be reduced together; a lone tensor is "
        "never held back",
        unit="ms",
        scope="all",
        aliases=(_same("HOROVOD_CYCLE_TIME", number(0, 1e4)),),
    ),
    Knob(
        "AUTOTUNE",
        BOOL,
        False,
        "find the fastest FUSION_BYTES (not above the default), CYCLE_TIME_MS, CHUNK_BYTES and "
        "ALGORITHM by trying, unless they are set",
        scope="all",
        aliases=(_horovod_bool("HOROVOD_AUTOTUNE"),),
    ),
    Knob(
        "AUTOTUNE_LOG",
        PATH,
        None,
        "file for what was tried, as CSV; unset: none",
        scope="rank 0",
        aliases=(_same("HOROVOD_AUTOTUNE_LOG", PATH),),
    ),
    Knob(
        "AUTOTUNE_WARMUP_SAMPLES",
        _COUNT,
        3,
        "samples before anything is tried",
        scope="rank 0",
        aliases=(_same("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", _COUNT),),
    ),
    Knob(
        "AUTOTUNE_STEPS_PER_SAMPLE",
        integer(1, 10**6),
        10,
        "steps of training over which something is tried",
        scope="rank 0",
        aliases=(_same("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", integer(1, 10**6)),),
    ),
    Knob(
        "CACHE_CAPACITY",
        _COUNT,
        8192,
        "tensors whose negotiation is remembered; 0: none",
        scope="all",
        aliases=(_same("HOROVOD_CACHE_CAPACITY", _COUNT),),
    ),
    Knob(
        "REPRODUCIBLE",
        BOOL,
        False,
        "the same bits in every run, whatever arrives when (sums in rank order); costs some speed "
        "over a network",
        scope="all",
    ),
    Knob(
        "DYNAMIC_PROCESS_SETS",
        BOOL,
        False,
        "allow add_process_set and remove_process_set after init",
        scope="all",
        aliases=(_horovod_bool("HOROVOD_DYNAMIC_PROCESS_SETS"),),
    ),
    Knob(
        "TRANSPORT",
        choice("auto", "shm", "mpi"),
        "auto",
        "how bytes travel; auto: shared memory where all ranks are on one host, else MPI",
        scope="all",
    ),
    Knob(
        "BACKEND",
        choice("auto", "host", "shm_direct"),
        "auto",
        "how batches are reduced; auto: shm_direct where the transport is shared memory",
        scope="all",
    ),
    Knob(
        "CHUNK_BYTES",
        CHUNK,
        0,
        "blocks in which allreduces walk through shared memory, and messages of rings, as nearly "
        "as they can be had; 0: by the backend, and by the size of what is reduced",
        unit="bytes",
        scope="all",
    ),
    Knob(
        "ALGORITHM",
        ALGORITHMS,
        "auto",
        "how allreduces go over several hosts, for batches of any size, or of up to 64 KiB, up to "
        "4 MiB and larger; auto: the cheapest for their size, by what a "
        "message costs between the hosts, measured at init; three_phase and leader need shared "
        "memory on each host, and REPRODUCIBLE=1 allows auto only: it sums in rank order",
        scope="all",
    ),
    Knob(
        "GPU",
        choice("auto", "nccl", "staged"),
        "auto",
        "how tensors in the memory of a GPU travel; nccl: by NCCL, or not at all; staged: by way "
        "of the host; auto: by NCCL where every rank has it and a GPU of its own",
        scope="all",
    ),
    Knob(
        "NCCL_LIBRARY",
        PATH,
        None,
        "libnccl.so.2 to use; unset: the one that the framework has loaded, else that of an "
        "nvidia-nccl-cu* package, else the system's",
    ),
    Knob(
        "CUDA_LIBRARY",
        PATH,
        None,
        "NVIDIA's driver; unset: libcuda.so.1 of the system",
    ),
    Knob(
        "STALL_WARNING_S",
        _SECONDS,
        60.0,
        "a tensor that waits this long for some ranks is logged, with their numbers; 0: never",
        unit="s",
        scope="rank 0",
        aliases=(
            _horovod_stall_check("true means 0"),
            _same("HOROVOD_STALL_CHECK_TIME_SECONDS", _SECONDS),
        ),
    ),
    Knob(
        "STALL_SHUTDOWN_S",
        _SECONDS,
        0.0,
        "a tensor that waits this long for some ranks ends the job with StalledError; 0: never",
        unit="s",
        scope="rank 0",
        aliases=(
            _horovod_stall_check("true means 0"),
            _same("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _SECONDS),
        ),
    ),
    Knob(
        "TIMEOUT_S",
        _SECONDS,
        300.0,
        "longest that init, or one batch of tensors, may wait for other ranks; 0: for ever",
        unit="s",
    ),
    Knob(
        "SPIN_US",
        number(0, 1e6),
        50.0,
        "how long the engine polls before it sleeps",
        unit="us",
    ),
    Knob(
        "ARENA_BYTES",
        BYTES,
        16 * 2**30,
        "most memory of a rank that its peers on the host share, for gradients that are reduced "
        "where they lie; address space until it is used; 0: none",
        unit="bytes",
        scope="rank 0",
    ),
    Knob(
        "CPU",
        CORES,
        None,
        "cores that the engines' threads of this host are bound to, in order of local rank; "
        "unset: not bound",
        aliases=(_same("HOROVOD_THREAD_AFFINITY", CORES),),
    ),
    Knob(
        "KERNELS",
        choice("auto", "portable", "avx2", "avx512"),
        "auto",
        "instruction set of the arithmetic; all give the same bits",
    ),
    Knob(
        "TENSORFLOW_PLUGIN",
        choice("auto", "off"),
        "auto",
        "off: TensorFlow communicates through tf.numpy_function, as it does where hororing's "
        "operations cannot be loaded",
    ),
    Knob(
        "LOG_LEVEL",
        LEVEL,
        "warning",
        "least level that is logged, to Python's logger 'hororing'",
        aliases=(_same("HOROVOD_LOG_LEVEL", LEVEL),),
    ),
    Knob(
        "LOG_HIDE_TIME",
        BOOL,
        False,
        "no time in log lines (where the script has configured no logging of its own)",
        aliases=(_horovod_bool("HOROVOD_LOG_HIDE_TIME"),),
    ),
    Knob(
        "TIMELINE",
        PATH,
        None,
        "file for the timeline of all ranks, written by rank 0; unset: none until start_timeline()",
        scope="rank 0",
        aliases=(
            Alias(
                "HOROVOD_TIMELINE",
                _horovod_timeline,
                "a path, or DYNAMIC",
                "DYNAMIC means unset: start_timeline() always works here",
            ),
        ),
    ),
    Knob(
        "TIMELINE_MARK_CYCLES",
        BOOL,
        False,
        "CYCLE_START events in the timeline",
        scope="rank 0",
        aliases=(_horovod_bool("HOROVOD_TIMELINE_MARK_CYCLES"),),
    ),
)

# ---------------------------------------------------------------------------------------------
# Values


@dataclass(frozen=True)
class Setting:
    """The value of one knob and where it comes from: a variable's name, or "default"."""

    value: Any
    source: str = "default"


class Config(Mapping[str, Any]):
    """The values by knob name: ``config["FUSION_BYTES"]``."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self.settings = dict(settings)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __len__(self) -> int:
        return len(self.settings)

    def log_level(self) -> int:
        """LOG_LEVEL as a number of Python's logging."""
        return _LEVELS[self["LOG_LEVEL"]]

    def core_for(self, local_rank: int) -> int:
        """Core of CPU for a rank of this host; -1 where none was given."""
        cores = self["CPU"]
        if cores is None:
            return -1
        if local_rank >= len(cores):
            setting = self.settings["CPU"]
            raise ValueError(
                f"{setting.source}={CORES.show(cores)!r} has no core for local rank {local_rank}: "
                f"give {CORES.accepted}"
            )
        return int(cores[local_rank])

    def fingerprint(self) -> str:
        """Lines "variable=value" of what all ranks must share."""
        return "\n".join(
            f"{knob.variable}={knob.show(self[knob.name])}" for knob in KNOBS if knob.scope == "all"
        )


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read every knob from the environment.

    Raises
    ------
    ValueError : a text that is not of the accepted form, or an unknown HORORING_* variable.
    """
    env = os.environ if environ is None else environ
    _refuse_unknown(env)
    settings = {knob.name: _read(knob, env) for knob in KNOBS}
    _threshold(settings)
    return Config(settings)


# FUSION may be a threshold itself: there is one.
def _threshold(settings: dict[str, Setting]) -> None:
    fusion, threshold = settings["FUSION"], settings["FUSION_BYTES"]
    if isinstance(fusion.value, str):
        return
    if threshold.source == PREFIX + "FUSION_BYTES" and threshold.value != fusion.value:
        raise ValueError(
            f"{fusion.source}={FUSION.show(fusion.value)} contradicts {threshold.source}="
            f"{BYTES.show(threshold.value)}: set one of them"
        )
    settings["FUSION_BYTES"] = fusion


def horovod_notes(environ: Mapping[str, str] | None = None) -> list[tuple[int, str]]:
    """What to log about Horovod's variables that no knob reads: level and text."""
    used = frozenset(alias.name for knob in KNOBS for alias in knob.aliases)
    return list(horovod_variables.notes(os.environ if environ is None else environ, used))


def _read(knob: Knob, env: Mapping[str, str]) -> Setting:
    own = Alias(knob.variable, knob.form.parse, knob.form.accepted)
    for alias in (own, *knob.aliases):
        text = env.get(alias.name, "").strip()
        if not text:
            continue
        try:
            value = alias.parse(text)
        except BadText:
            raise ValueError(
                f"{alias.name}={text!r} is not understood: expected {alias.accepted}"
            ) from None
        if value is not None:
            return Setting(value, alias.name)
    return Setting(knob.default)


def _refuse_unknown(env: Mapping[str, str]) -> None:
    known = [knob.variable for knob in KNOBS]
    unknown = [name for name in env if name.startswith(PREFIX) and name not in known]
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0)[0]
        raise ValueError(
            f"unknown variable {unknown[0]}={env[unknown[0]]!r}; did you mean {nearest}? "
            "All are listed by: python -m hororing config"
        )


# ---------------------------------------------------------------------------------------------
# Documentation


def table(config: Config) -> str:
    """Effective values, one line per knob."""
    rows = [
        (knob.variable, knob.show(value) or "(unset)", knob.unit, setting.source)
        for knob in KNOBS
        for setting in (config.settings[knob.name],)
        for value in (setting.value,)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
        ).rstrip()
        for row in rows
    )


def markdown() -> str:
    """docs/configuration.md, which a test compares with this."""
    lines = [
        "# Configuration",
        "",
        "    $ python -m hororing config    # every setting, its value and where it comes from",
        "",
        "<!-- Generated: python -m hororing config --markdown > docs/configuration.md -->",
        "",
        "Everything is an environment variable. A value that is not understood and an unknown",
        f"`{PREFIX}*` variable are errors at `init()`. An empty variable counts as not set.",
        "Horovod's name is accepted where ours is not set. Variables marked *all* must be the same",
        "on every rank, which `init()` checks; of those marked *rank 0*, that rank's value counts.",
        "With several hosts, `mpirun -x NAME` sends a variable to all ranks.",
        "",
        "| variable | default | unit | ranks | meaning |",
        "|---|---|---|---|---|",
    ]
    for knob in KNOBS:
        default = f"`{knob.show(knob.default)}`" if knob.default is not None else "unset"
        lines.append(
            f"| `{knob.variable}` | {default} | {knob.unit} | {knob.scope} | {knob.help}. "
            f"Accepts {knob.form.accepted}. |"
        )
    lines += ["", "| Horovod's name | ours | |", "|---|---|---|"]
    for knob in KNOBS:
        for alias in knob.aliases:
            lines.append(f"| `{alias.name}` | `{knob.variable}` | {alias.note} |")
    lines += [
        "",
        "Horovod's booleans follow its rule: true is what begins with a positive number, so that",
        "`true` is false. `HOROVOD_FUSION_THRESHOLD` is not rounded.",
        "",
        "| no effect here, which rank 0 logs as a warning | what happens instead |",
        "|---|---|",
        *(f"| `{row.name}` | {row.instead} |" for row in horovod_variables.UNUSED),
        "",
        "All other `HOROVOD_*` variables have no meaning here and are ignored; rank 0 names those",
        "that are set in one line of level info.",
        "",
        "Before MPI is initialised, `init()` sets `OMPI_MCA_btl=self,sm,tcp`, `OMPI_MCA_pml=ob1`",
        "and `OMPI_MCA_osc=^ucx` where they are not set, if Open MPI's `mpirun` started the job",
        "and all its ranks are on one host: MPI then starts in a tenth of the time.",
    ]
    return "\n".join(lines) + "\n"
