"""One flag for each knob of the table, and Horovod's flags for the same."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from hororing.config.forms import BOOL, BadText
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
# Flags whose meaning differs from their knob: flag, knob, whether a value follows, the conversion.
_OTHERS: list[tuple[str, str, bool, Callable[[str], str]]] = [
    ("--fusion-threshold-mb", "FUSION_BYTES", True, lambda text: f"{text}MiB"),
    ("--disable-cache", "CACHE_CAPACITY", False, lambda _: "0"),
    ("--no-stall-check", "STALL_WARNING_S", False, lambda _: "0"),
    ("--log-with-timestamp", "LOG_HIDE_TIME", False, lambda _: "0"),
    ("--no-log-hide-timestamp", "LOG_HIDE_TIME", False, lambda _: "0"),
    ("--tcp", "TRANSPORT", False, lambda _: "tcp"),
]
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
_STALL_CHECK_OFF = "HOROVOD_STALL_CHECK_DISABLE"  # which --stall-check overrides
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
    for knob in KNOBS:
        if knob.name in _LEFT_OUT:
            continue
        flag = "--" + knob.name.lower().replace("_", "-")
        names = [flag, *_ALIASES.get(knob.name, [])]
        help_text = f"{knob.help}".replace("%", "%%")
        if knob.form is BOOL:
            group.add_argument(
                *names, dest=_PREFIX + knob.name, action="store_const", const="1", help=help_text
            )
            group.add_argument(
                "--no-" + flag[2:],
                dest=_PREFIX + knob.name,
                action="store_const",
                const="0",
                help=argparse.SUPPRESS,
            )
        else:
            group.add_argument(
                *names,
                dest=_PREFIX + knob.name,
                type=_checked(knob, str),
                metavar=knob.unit.upper() or "VALUE",
                help=help_text,
            )
    for flag, name, has_value, meaning in _OTHERS:
        knob = next(each for each in KNOBS if each.name == name)
        if has_value:
            group.add_argument(
                flag, dest=_PREFIX + name, type=_checked(knob, meaning), help=argparse.SUPPRESS
            )
        else:
            group.add_argument(
                flag, dest=_PREFIX + name, action="store_const", const=meaning(""),
                help=argparse.SUPPRESS,
            )  # fmt: skip
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS}
    for flag, variable in _UNUSED.items():
        dest = _PREFIX + variable
        group.add_argument(flag, dest=dest, action="store_const", const="1", **hidden)
        group.add_argument("--no-" + flag[2:], dest=dest, action="store_const", const="0", **hidden)
    for flag, variable in _UNUSED_VALUES.items():
        on = variable == "HOROVOD_AUTOTUNE"  # a switch, whatever the value of these flags
        convert: Callable[[str], str] = (lambda _: "1") if on else str
        group.add_argument(flag, dest=_PREFIX + variable, type=convert, **hidden)
    dest = _PREFIX + _STALL_CHECK_OFF
    group.add_argument("--stall-check", dest=dest, action="store_const", const="0", **hidden)
    for flag, instead in _REFUSED.items():
        group.add_argument(flag, action=_Refuse, nargs="?", const=instead, **hidden)


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
