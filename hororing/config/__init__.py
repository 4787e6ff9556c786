"""Environment variables in, one checked `Config` out.

Every knob is a variable HORORING_<name>. If Horovod has the same knob, its HOROVOD_* name works
too; ours wins if both are set. An empty variable counts as unset. The table
(hororing/config/knobs.py) determines parsing, `python -m hororing config`, docs/configuration.md,
and the values that must be the same on all ranks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hororing.config import environment, horovod_variables
from hororing.config.forms import CORES, LEVELS, STEPS, BadText
from hororing.config.knobs import KNOBS, PREFIX, Alias, Knob


@dataclass(frozen=True)
class Setting:
    """The value of one knob and its source: a variable's name, or "default"."""

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
        return LEVELS[self["LOG_LEVEL"]]

    def changed(self) -> dict[str, str]:
        """The settings that are not defaults: texts by variable."""
        return {
            knob.variable: knob.show(self[knob.name])
            for knob in KNOBS
            if self.settings[knob.name].source != "default"
        }

    def core_for(self, local_rank: int) -> int:
        """The CPU core for a rank of this host; -1 if none is given."""
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
        """Lines "variable=value" of the settings that must be the same on all ranks."""
        return "\n".join(
            f"{knob.variable}={knob.show(self[knob.name]) or 'unset'}"
            for knob in KNOBS
            if knob.scope == "all"
        )


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read every knob from the environment.

    Raises
    ------
    ValueError : an invalid text, an unknown HORORING_* variable, or two that do not go together.
    """
    env = environment.live() if environ is None else environ
    _refuse_unknown(env)
    settings = {knob.name: _read(knob, env) for knob in KNOBS}
    _timeline_steps(settings)
    return Config(settings)


def _timeline_steps(settings: Mapping[str, Setting]) -> None:
    steps = settings["TIMELINE_STEPS"]
    if steps.value and not settings["TIMELINE"].value:
        raise ValueError(
            f"{steps.source}={STEPS.show(steps.value)} chooses steps of the timeline, but "
            f"{PREFIX}TIMELINE names no file for it: set it, too, or unset {steps.source}"
        )


def horovod_notes(environ: Mapping[str, str] | None = None) -> list[tuple[int, str]]:
    """Return log records about Horovod's variables that no knob reads: level and text."""
    used = frozenset(alias.name for knob in KNOBS for alias in knob.aliases)
    return list(horovod_variables.notes(environment.live() if environ is None else environ, used))


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
    knobs = [knob.variable for knob in KNOBS]
    known = {*knobs, *environment.VARIABLES}
    unknown = [name for name in env if name.startswith(PREFIX) and name not in known]
    if unknown:
        misspelt = difflib.get_close_matches(unknown[0], environment.VARIABLES, n=1, cutoff=0.9)
        nearest = (misspelt or difflib.get_close_matches(unknown[0], knobs, n=1, cutoff=0))[0]
        # Do not show the value: it may be a secret with a misspelt name.
        shown = "..." if "SECRET" in nearest else repr(env[unknown[0]])
        raise ValueError(
            f"unknown variable {unknown[0]}={shown}; did you mean {nearest}? "
            "All are listed by: python -m hororing config"
        )
