"""What a user chooses, as arguments or as the text of HORORING_GUARD."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Final

from hororing import config

ON_DIVERGENCE: Final = ("error", "warn", "repair")
ON_NONFINITE: Final = ("warn", "error", "skip")


@dataclass(frozen=True)
class Options:
    """The options of a guard.

    every : int
        Replicas are compared after each of this many steps, and after the first one. 0: never.
    on_divergence : "error", "warn", "repair", or a function of a `Finding`
        What happens on all ranks when replicas differ.
    ignore : patterns of names, as for `fnmatch`
        Tensors that are not compared.
    on_nonfinite : "warn", "error", "skip" or None
        What happens on all ranks when a gradient of one is infinite or NaN; None: nobody looks.
    max_skips : int
        How many steps may be skipped in a row.
    """

    every: int = 100
    on_divergence: str | Callable[[Any], object] = "error"
    ignore: tuple[str, ...] = ()
    on_nonfinite: str | None = "warn"
    max_skips: int = 10

    def ignores(self, name: str) -> bool:
        """Whether the tensor is not compared."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)


def checked(what: str, **given: Any) -> Options:
    """Return the options. ValueError or TypeError, which name `what`, for a wrong one."""
    for name in {"every", "max_skips"} & given.keys():
        number = given[name]
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{what}: {name}={number!r} must be a number of steps")
        if number < 0:
            raise ValueError(f"{what}: {name}={number} must not be negative; 0: none")
    if given.get("on_nonfinite") is not None:
        _check_choice(what, "on_nonfinite", given["on_nonfinite"], ON_NONFINITE, " or None")
    chosen = given.get("on_divergence", "error")
    if not callable(chosen):
        _check_choice(what, "on_divergence", chosen, ON_DIVERGENCE, " or a function")
    ignore: Iterable[str] = given.get("ignore", ())
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    if not all(isinstance(each, str) for each in ignore):
        raise TypeError(f"{what}: ignore={ignore!r} must be patterns of names")
    return Options(**{**given, "ignore": ignore})


def _check_choice(what: str, name: str, given: Any, known: tuple[str, ...], also: str = "") -> None:
    if given not in known:
        choices = ", ".join(f'"{each}"' for each in known)
        raise ValueError(f"{what}: {name}={given!r} must be one of {choices}{also}")


def from_environment() -> Options | None:
    """Return the options of HORORING_GUARD; None: it is unset."""
    text: str | None = config.load()["GUARD"]
    return parse(text) if text else None


def parse(text: str) -> Options:
    """Return the options of a text, such as "every=100,ignore=*.ema"; "1": the defaults."""
    what = f"HORORING_GUARD={text}"
    given: dict[str, Any] = {"every": 100, "ignore": []}
    known = {each.name for each in fields(Options)}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if part.strip() == "1":
            continue
        if name not in known or not equals:
            raise ValueError(
                f"{what}: {part!r} is no option; write name=value with {', '.join(sorted(known))}, "
                "separated by commas"
            )
        if name == "ignore":  # may occur several times
            given["ignore"].append(value)
        else:
            given[name] = int(value) if value.lstrip("-").isdigit() else value
            if (name, value) == ("on_nonfinite", "none"):
                given[name] = None
    return checked(what, **given)
