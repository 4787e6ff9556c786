"""One report of pytest from those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hororing.testing.messages import Phase
from hororing.testing.pool import Outcome
from hororing.testing.sentences import PHASES, first_line, phase_of, ranks, state, troubles

_XPASS = "[XPASS(strict)]"


def merge(
    item: pytest.Item, outcomes: Sequence[Outcome], limit_s: float
) -> list[pytest.TestReport]:
    """Return the reports of a test, in the order of its phases."""
    merged = []
    for when in PHASES:
        phases: dict[int, Phase] = {}
        for outcome in outcomes:
            found = [each for each in outcome.phases if each.when == when]
            # Subtests have reports of their own, before that of the test.
            failed = [each for each in found if each.data["outcome"] == "failed"]
            if found:
                phases[outcome.rank] = (failed or found[-1:])[0]
        troubled = [each for each in outcomes if each.trouble and phase_of(each) == when]
        if not phases and not troubled:
            continue
        merged.append(_Merge(item, when, phases, troubled, outcomes, limit_s).report())
        # The end of one rank is why others did not end: their later phases say nothing new.
        if troubled or (when == "setup" and merged[-1].outcome == "failed"):
            break
    if merged and merged[-1].when != "teardown":  # plug-ins expect it
        merged.append(_new(item, "teardown", "passed", None))
    return merged


def _new(item: pytest.Item, when: str, outcome: Any, text: Any) -> pytest.TestReport:
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, keywords, outcome, text, when,  # type: ignore[arg-type]
        duration=0.0,
    )  # fmt: skip


class _Merge:
    """The reports of one phase."""

    def __init__(
        self, item: pytest.Item, when: str, phases: dict[int, Phase],
        troubled: list[Outcome], outcomes: Sequence[Outcome], limit_s: float,
    ) -> None:  # fmt: skip
        self._item, self._when, self._limit_s = item, when, limit_s
        self._phases, self._troubled, self._outcomes = phases, troubled, outcomes
        self._reports = {rank: self._read(phase) for rank, phase in sorted(phases.items())}
        self._printed = {rank: list(each.sections) for rank, each in self._reports.items()}

    def _read(self, phase: Phase) -> pytest.TestReport:
        hook = self._item.config.hook
        found = hook.pytest_report_from_serializable(config=self._item.config, data=phase.data)
        assert isinstance(found, pytest.TestReport)
        return found

    def report(self) -> pytest.TestReport:
        """Return one for all ranks."""
        failed = [rank for rank, each in self._reports.items() if each.failed]
        expected = [rank for rank, each in self._reports.items() if _is_expected(each)]
        if expected and not self._dead:
            # A rank has failed as expected. Others could not: they lost it, or went on.
            failed = [
                rank for rank in failed
                if self._phases[rank].blame == "own"
                and _XPASS not in self._reports[rank].longreprtext
            ]  # fmt: skip
        if expected and not failed and not self._dead:
            result = self._reports[expected[0]]
        elif self._troubled and not any(self._phases[rank].blame == "own" for rank in failed):
            result = _new(
                self._item,
                self._when,
                "failed",
                troubles(self._outcomes, self._when, self._limit_s),
            )
        elif failed:
            result = self._failure(failed)
        else:
            passed = [rank for rank, each in self._reports.items() if each.passed]
            result = self._reports[passed[0] if passed else min(self._reports)]
        result.nodeid, result.location = self._item.nodeid, self._item.location
        result.duration = max([each.duration for each in self._reports.values()], default=0.0)
        result.sections = self._sections(result)
        return result

    @property
    def _dead(self) -> bool:
        return any(each.died is not None for each in self._troubled)

    def _failure(self, failed: list[int]) -> pytest.TestReport:
        """The report of the rank to blame, with the others as sections."""
        own = [rank for rank in failed if self._phases[rank].blame == "own"] or failed
        first = min(own, key=lambda rank: self._phases[rank].at)
        same = [rank for rank in own if _crash(self._reports[rank]) == _crash(self._reports[first])]
        if len(same) > 1:
            first = same[0]
        result = self._reports[first]
        who = "every rank" if len(same) == len(self._outcomes) else ranks(same)
        crash = getattr(result.longrepr, "reprcrash", None)
        if crash is not None and len(self._outcomes) > 1:
            crash.message = f"{who}: {crash.message}"
        lines = [f"{who} failed: {first_line(self._phases[first].error)}"]
        lines += [
            f"{ranks([rank])} {'lost it' if self._phases[rank].blame == 'peers' else 'failed'}: "
            f"{first_line(self._phases[rank].error)}"
            for rank in failed if rank not in same
        ]  # fmt: skip
        lines += [state(each) for each in self._outcomes if each.trouble]
        own_sections = [
            (f"rank {rank}", self._reports[rank].longreprtext)
            for rank in failed if rank not in same
        ]  # fmt: skip
        about = [("ranks", "\n".join(lines))] if len(self._outcomes) > 1 else []
        result.sections = [*about, *own_sections]
        return result

    def _sections(self, result: pytest.TestReport) -> list[tuple[str, str]]:
        own = [each for each in result.sections if not each[0].startswith("Captured")]
        many = len(self._outcomes) > 1
        printed = [
            (f"{name}, rank {rank}" if many else name, text)
            for rank, sections in self._printed.items()
            for name, text in sections
            if name.startswith("Captured")
        ]
        printed += [
            (f"Captured output {self._when}, rank {each.rank}", each.output)
            for each in self._troubled if each.output
        ]  # fmt: skip
        return [*own, *printed]


def _is_expected(report: pytest.TestReport) -> bool:
    return report.skipped and hasattr(report, "wasxfail")


def _crash(report: pytest.TestReport) -> object:
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else (crash.path, crash.lineno)


def not_started(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    """Return the reports of a test for which there are no ranks."""
    return [_new(item, "setup", "failed", text), _new(item, "teardown", "passed", None)]
