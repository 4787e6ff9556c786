"""One flag for each knob of the table, and Horovod's flags for the same."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from hororing.config.forms import BOOL, NETWORKS, BadText
from hororing.config.knobs import KNOBS, Knob

_PREFIX = "knob "  # of names in the namespace

# Horovod's names of flags with values of the same form.
_ALIASES = {
    "TIMELINE": ["--timeline-filename"],
    "STALL_WARNING_S": ["--stall-check-warning-time-seconds"],
    "STALL_SHUTDOWN_S": ["--stall-check-shutdown-time-seconds"],
    "ELASTIC_TIMEOUT_S": ["--elastic-timeout"],
    "LOG_HIDE_TIME": ["--log-without-timestamp", "--log-hide-timestamp"],
    "CPU": ["--thread-affinity"],
    "INTERFACE": ["--network-interface", "--network-interfaces"],
}
# Flags that set a knob to a text of their own.
_CONSTANT = {
    "--log-with-timestamp": ("LOG_HIDE_TIME", "0"),
    "--no-log-hide-timestamp": ("LOG_HIDE_TIME", "0"),
    "--tcp": ("TRANSPORT", "tcp"),
}
# Horovod's flags without an effect. They set Horovod's variable, so that rank 0 logs why.
_UNUSED = {
    "--autotune": "HOROVOD_AUTOTUNE",
    "--hierarchical-allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "--hierarchical-allgather": "HOROVOD_HIERARCHICAL_ALLGATHER",
    "--torus-allreduce": "HOROVOD_TORUS_ALLREDUCE",
    "--mpi-threads-disable": "HOROVOD_MPI_THREADS_DISABLE",
}
_UNUSED_VALUES = {
    "--autotune-log-file": "HOROVOD_AUTOTUNE",
    "--autotune-warmup-samples": "HOROVOD_AUTOTUNE",
    "--autotune-steps-per-sample": "HOROVOD_AUTOTUNE",
    "--autotune-bayes-opt-max-samples": "HOROVOD_AUTOTUNE",
    "--autotune-gaussian-process-noise": "HOROVOD_AUTOTUNE",
    "--num-nccl-streams": "HOROVOD_NUM_NCCL_STREAMS",
    "--gloo-timeout-seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
}
_STALL_CHECK_OFF = "HOROVOD_STALL_CHECK_DISABLE"  # two knobs in one
# horovodrun's cache of ssh checks; hororun has none.
_NOTHING_TO_DO = ["--disable-cache"]
# Horovod's flags that are errors, and what to do.
_REFUSED = {
    "--config-file": "give its settings as flags, and keep them with --export-config FILE",
    "--binding-args": "use --numa-aware, or with --mpi: --mpi-args",
    "--jsrun": "in a job of LSF, hororun finds the hosts by itself; or use mpirun",
    "--prefix-output-with-timestamp": "lines have the rank only (--tag-output)",
    "-prefix-timestamp": "lines have the rank only (--tag-output)",
}
# Flags of hororun itself; ranks get their values in another way.
_LEFT_OUT = {"ALONE"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all of them, in a group of their own."""
    group = parser.add_argument_group(
        "settings", "One flag for each HORORING_* variable (python -m hororing config)."
    )

    def constant(name: str, text: str, *flags: str, shown: str = argparse.SUPPRESS) -> None:
        dest = _PREFIX + name
        group.add_argument(*flags, dest=dest, action="store_const", const=text, help=shown)

    for knob in KNOBS:
        if knob.name in _LEFT_OUT:
            continue
        flag = "--" + knob.name.lower().replace("_", "-")
        names = [flag, *_ALIASES.get(knob.name, [])]
        help_text = f"{knob.help}".replace("%", "%%")
        if knob.form is BOOL:
            constant(knob.name, "1", *names, shown=help_text)
            constant(knob.name, "0", "--no-" + flag[2:])
        else:
            group.add_argument(
                *names,
                dest=_PREFIX + knob.name,
                action=_Unite if knob.form is NETWORKS else "store",
                type=_checked(knob, str),
                metavar=knob.unit.upper() or "VALUE",
                help=help_text,
            )
        if knob.name == "FUSION_BYTES":
            group.add_argument(
                "--fusion-threshold-mb",
                dest=_PREFIX + knob.name,
                type=_checked(knob, lambda text: f"{text}MiB"),
                help=argparse.SUPPRESS,
            )
    for flag, (name, text) in _CONSTANT.items():
        constant(name, text, flag)
    for flag, variable in {**_UNUSED, "--stall-check": _STALL_CHECK_OFF}.items():
        on, off = ("0", "1") if variable == _STALL_CHECK_OFF else ("1", "0")
        constant(variable, on, flag)
        constant(variable, off, "--no-" + flag[2:])
    for flag, variable in _UNUSED_VALUES.items():
        switch = variable == "HOROVOD_AUTOTUNE"  # whatever the value of these flags
        convert: Callable[[str], str] = (lambda _: "1") if switch else str
        group.add_argument(flag, dest=_PREFIX + variable, type=convert, help=argparse.SUPPRESS)
    for flag in _NOTHING_TO_DO:
        group.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag, instead in _REFUSED.items():
        group.add_argument(flag, action=_Refuse, nargs="?", const=instead, help=argparse.SUPPRESS)


class _Unite(argparse.Action):
    """Joins the lists of several flags."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} of horovodrun has no counterpart: {self.const}")


def chosen(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the given flags as variables."""
    given = {knob.variable: getattr(arguments, _PREFIX + knob.name, None) for knob in KNOBS}
    for variable in (*_UNUSED.values(), *_UNUSED_VALUES.values(), _STALL_CHECK_OFF):
        given[variable] = getattr(arguments, _PREFIX + variable, None)
    return {name: text for name, text in given.items() if text is not None}


def _checked(knob: Knob, meaning: Callable[[str], str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        try:
            knob.form.parse(meaning(text))
        except BadText:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not understood: expected {knob.form.accepted}"
            ) from None
        return meaning(text)

    return parse
