"""What an elastic job tells its user: a line for each event, with the time, the cause first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from hororing._job.rendezvous.generations import World
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.host.output import Output
from hororing.hororun.job.elastic_processes import ElasticProcess

_ALONE_S = 1.0  # what has happened is told without the next generation if that takes longer
_CODE_S = 0.3  # a generation may form before the exit code of a lost process is known


class News:
    """Collects the causes of the next generation, and tells of both in one line.

    Parameters
    ----------
    several : processes are on several hosts.
    """

    def __init__(self, output: Output, several: bool) -> None:
        self._output, self._several = output, several
        self._causes: list[str | ElasticProcess] = []  # of the next generation
        self._quiet: list[str | ElasticProcess] = []  # causes if there is no other
        self._told = 0  # how many of them have been told
        self._since: float | None = None  # when the first of them stopped the training
        self._formed = ""  # the last generation, until it is told
        self._later: list[str] = []  # what follows from the causes
        self.tell_at: float | None = None

    def say(self, text: str) -> None:
        """Print a line."""
        self._output.log(f"{time.strftime('%H:%M:%S')} {text}")

    def say_after(self, text: str) -> None:
        """Print a line, after the causes that have not been told."""
        if self.tell_at is None:
            self.say(text)
        else:
            self._later.append(text)

    def add(self, cause: str | ElasticProcess, *, stops: bool = False, quiet: bool = False) -> None:
        """Note a cause of the next generation.

        `stops`: the training waits for that. `quiet`: it is told only if it is the only cause.
        """
        if quiet:
            self._quiet.append(cause)
        elif cause not in self._causes:
            self._causes.append(cause)
            self.tell_at = self.tell_at or time.monotonic() + _ALONE_S
        if stops:
            self._since = self._since or time.monotonic()

    def say_end(self, process: ElasticProcess) -> None:
        """Tell how a process has ended, unless it is a cause that will be told."""
        if process not in self._causes[self._told :]:
            self._output.fold()
            self.say(process.described(self._several))

    def say_changes(self, before: Mapping[str, int | None], hosts: Iterable[Host]) -> None:
        """Tell which hosts have another number of slots than before."""
        for host in hosts:
            if (old := before.get(host.name)) not in (None, host.slots):
                self.say(f"host {host.name} has {host.slots} slots now, and had {old}")

    def form(self, world: World) -> str:
        """Note that a generation has formed; return its causes."""
        if self._formed:
            self.tell()
        if not self._causes:
            self._causes = self._quiet or ([world.why] if world.why else [])
        self._quiet = []
        causes = self._describe(self._causes) or "start"
        if world.generation > 1:
            self._formed = _described(world, self._since)
            self.tell_at = time.monotonic() + _CODE_S
        else:
            self._causes, self._told, self.tell_at = [], 0, None
        self._since = None
        return causes

    def tell_due(self, ending: bool) -> None:
        """Tell what is complete, or has waited long enough. `ending`: the job is."""
        if ending:
            return
        left = self._causes[self._told :]
        known = not any(
            isinstance(each, ElasticProcess) and each.code is None and not each.end for each in left
        )
        late = self.tell_at is not None and time.monotonic() >= self.tell_at
        if late or (self._formed and known):
            self.tell()

    def tell(self) -> None:
        """Tell what has happened, and the generation that has formed since."""
        self._output.fold()
        text = self._describe(self._causes[self._told :])
        if text or self._formed:
            self.say("; ".join(filter(None, (text, self._formed))))
        self._told, self.tell_at = len(self._causes), None
        if self._formed:
            self._causes, self._told, self._formed = [], 0, ""
        later, self._later = self._later, []
        for each in later:
            self.say(each)

    def _describe(self, causes: Sequence[str | ElasticProcess]) -> str:
        return "; ".join(c if isinstance(c, str) else c.described(self._several) for c in causes)


def _described(world: World, since: float | None) -> str:
    """Describe a generation that goes on; `since`: when the training stopped for it."""
    after = "" if since is None else f" after {time.monotonic() - since:.2f} s"
    lost = "" if world.lost < 0 else f", {world.lost} step{'s' * (world.lost != 1)} lost"
    if not lost and (step := max(each.step for each in world.members)):
        lost = f", from commit {step}"
    ranks = f"{len(world.members)} rank{'s' * (len(world.members) > 1)}"
    return f"generation {world.generation} with {ranks} trains on{after}{lost}"
