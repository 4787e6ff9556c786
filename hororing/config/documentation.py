"""The table of knobs as texts: `python -m hororing config`, docs/configuration.md."""

from __future__ import annotations

from hororing.config import Config, horovod_variables
from hororing.config.knobs import KNOBS, PREFIX


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
        "Before MPI is initialised, `init()` sets `OMPI_MCA_btl=self,sm`, `OMPI_MCA_pml=ob1` and",
        "`OMPI_MCA_osc=^ucx` where they are not set, if Open MPI's `mpirun` started the job and",
        "all its ranks are on one host: MPI starts in a tenth of the time then, and no rank",
        "listens on the network. With less than 32 MiB free in `/dev/shm` it is `self,sm,tcp`.",
    ]
    return "\n".join(lines) + "\n"
