"""Forms of values: conversion of texts in the environment to values, and back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_SIZES = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_SIZES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LEVELS = {"trace": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}


class BadText(Exception):
    """A text has the wrong form; `config.load` adds its name and source."""


@dataclass(frozen=True)
class Form:
    """The conversion of a text to a value."""

    accepted: str  # ends "expected ..."
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str


def parse_number(text: str, kind: type, least: float, most: float) -> Any:
    """`text` as a number of a range; BadText for anything else."""
    try:
        value = kind(text)
    except ValueError:
        raise BadText from None
    if not least <= value <= most:  # also NaN
        raise BadText
    return value


def integer(least: int, most: int) -> Form:
    """Whole numbers of a range."""
    return Form(
        f"a whole number from {least} to {most}", lambda text: parse_number(text, int, least, most)
    )


def number(least: float, most: float) -> Form:
    """Numbers of a range."""
    return Form(
        f"a number from {least:g} to {most:g}",
        lambda text: parse_number(text, float, least, most),
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
    if value > 2**40 or value != int(value):
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
    if name not in LEVELS:
        raise BadText
    return name


def _parse_steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    steps = parse_number(first, int, 1, 2**62), parse_number(last, int, 1, 2**62)
    if not colon or steps[0] > steps[1]:
        raise BadText
    return steps


_GUARD = re.compile(
    r"1|(every|max_skips)\s*=\s*\d+|ignore\s*=.+|on_divergence\s*=\s*(error|warn|repair)"
    r"|on_nonfinite\s*=\s*(warn|error|skip|none)"
)


def _parse_guard(text: str) -> str:
    if not all(_GUARD.fullmatch(part.strip()) for part in text.split(",")):
        raise BadText
    return text


BOOL = Form(f"one of {', '.join(_TRUE + _FALSE)}", _parse_bool, lambda value: str(int(value)))
BYTES = Form(
    "bytes, such as 67108864, 64MiB (1024 * 1024) or 64MB (1000 * 1000), at most 1024GiB",
    _parse_bytes,
    _show_bytes,
)
PATH = Form("a path", str)
NETWORKS = Form("addresses or names of networks, separated by commas", str)
GUARD = Form(
    "1 or, separated by commas, every=STEPS, on_divergence=error/warn/repair, ignore=PATTERN, "
    "on_nonfinite=warn/error/skip/none, max_skips=STEPS",
    _parse_guard,
)
CORES = Form(
    "core numbers separated by commas, one for each rank of a host",
    _parse_cores,
    lambda cores: ",".join(map(str, cores)),
)
STEPS = Form(
    "FROM:TO, whole numbers from 1, such as 100:110",
    _parse_steps,
    lambda steps: f"{steps[0]}:{steps[1]}",
)
LEVEL = Form("one of " + ", ".join(LEVELS), _parse_level)
