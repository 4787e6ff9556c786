"""The table of knobs as texts: `python -m hororing config`, docs/configuration.md."""

from __future__ import annotations

import textwrap

from hororing.config import Config, horovod_variables
from hororing.config.forms import BOOL, BYTES, PATH
from hororing.config.knobs import KNOBS, PREFIX, Knob

_UNITS = {"ms": " ms", "us": " us", "s": " s"}  # bytes say so themselves

# How the limits of counts and seconds end that are there for the parser only.
_ANY_NUMBER = ("from 0 to 2147483647", "from 0 to 1e+09")

# Sections of the page, by the names of their knobs or how these begin; the rest comes last.
_TOPICS = {
    "Fusion and order": ("FUSION_BYTES", "CYCLE_TIME", "CACHE", "REPRODUCIBLE"),
    "Networks, GPUs and MPI": (
        "TRANSPORT", "INTERFACE", "BACKEND", "GPU", "NCCL", "CUDA", "MPI",
    ),
    "Checks, hangs and failures": (
        "CHECK_", "GUARD", "VERIFY", "STALL_", "DEADLOCK", "TIMEOUT", "FLIGHT", "STACK_SIGNAL",
    ),
    "Elastic jobs": ("ELASTIC", "PEER_TIMEOUT", "RESET_LIMIT"),
    "Timeline": ("TIMELINE",),
    "Log": ("LOG_",),
    "Processor": ("SPIN", "CPU", "KERNELS"),
}  # fmt: skip


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
        "    $ hororing config    # every setting, its value and where it comes from",
        "",
        "<!-- Generated: python -m hororing config --markdown > docs/configuration.md -->",
        "",
        *_wrapped(
            "Every setting is an environment variable. A value that is not understood and an "
            f"unknown `{PREFIX}*` variable raise an error at `init()`. An empty variable counts "
            "as not set. If our variable is not set, Horovod's name is accepted. Switches take 1, "
            "true, yes, on, 0, false, no or off; sizes bytes, such as 67108864, 64MiB or 64MB; "
            "times and counts any number from 0, unless the table says otherwise. A variable "
            "marked *all* must be the same on every rank, which `init()` checks. For one marked "
            "*rank 0*, only the value of rank 0 counts. `hororun` passes these variables to all "
            "hosts; with mpirun, use `-x NAME`. [Clusters](clusters.md#without-a-launcher) has "
            "the variables that give a process its rank."
        ),
        "",
    ]
    for topic in [*_TOPICS, "More"]:
        rows = [_row(knob) for knob in KNOBS if _topic(knob) == topic]
        lines += [f"## {topic}", "", "| variable | meaning | default |", "|---|---|---|", *rows, ""]
    lines += ["## Horovod's names", "", "| Horovod's name | ours | note |", "|---|---|---|"]
    ours: dict[tuple[str, str], list[str]] = {}
    for knob in KNOBS:
        for alias in knob.aliases:
            ours.setdefault((alias.name, alias.note), []).append(f"`{knob.variable}`")
    lines += [f"| `{name}` | {', '.join(to)} | {note} |" for (name, note), to in ours.items()]
    lines += [
        "",
        *_wrapped(
            "Horovod's booleans follow its rule: a value is true if it begins with a positive "
            "number, so `true` is false. `HOROVOD_FUSION_THRESHOLD` is not rounded."
        ),
        "",
        *_wrapped(
            "These variables have no effect here. If the value of one asks for something that "
            "hororing does not do, rank 0 logs a warning:"
        ),
        "",
        "| variable | what happens instead |",
        "|---|---|",
        *(f"| `{row.name}` | {row.instead} |" for row in horovod_variables.UNUSED),
        "",
        *_wrapped(
            "All other `HOROVOD_*` variables have no meaning here and are ignored. Rank 0 names "
            "those that are set, in one line of level info."
        ),
        "",
        "## Open MPI's variables",
        "",
        *_wrapped(
            "If Open MPI's `mpirun` started the job and all its ranks are on one host, `init()` "
            "sets `OMPI_MCA_btl=self,sm`, `OMPI_MCA_pml=ob1` and `OMPI_MCA_osc=^ucx` before it "
            "initialises MPI, unless they are set. MPI then starts in a tenth of the time, and no "
            "rank listens on the network. If less than 32 MiB are free in `/dev/shm`, the first "
            "one is `self,sm,tcp`."
        ),
    ]
    return "\n".join(lines) + "\n"


def _topic(knob: Knob) -> str:
    found = [topic for topic, names in _TOPICS.items() if knob.name.startswith(names)]
    return found[0] if found else "More"


def _row(knob: Knob) -> str:
    default = "unset"
    if knob.default is not None:
        default = f"`{knob.show(knob.default)}`{_UNITS.get(knob.unit, '')}"
    marks = "" if knob.scope == "each" else f"; *{knob.scope}*"
    common = knob.form in (BOOL, BYTES, PATH) or knob.form.accepted.endswith(_ANY_NUMBER)
    form = "" if common else f". Accepts {knob.form.accepted}"
    return f"| `{knob.variable}` | {knob.help}{form} | {default}{marks} |"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, 120, subsequent_indent="  " * text.startswith("* "), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
