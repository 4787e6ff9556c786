"""The flags of elastic jobs, with Horovod's names."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hororing import config
from hororing.config import environment
from hororing.hororun.flags import knobs as knobs_module
from hororing.hororun.flags.host_lists import Host

# Any of the first ones makes the job elastic.
_MAKE_ELASTIC = ("min_np", "max_np", "host_discovery_script")
_ONLY_ELASTIC = ("slots_per_host", "blacklist_cooldown_range")
_ONLY_ELASTIC_KNOBS = ("RESET_LIMIT", "ELASTIC_TIMEOUT_S", "PEER_TIMEOUT_S")
NOT_ELASTIC = (
    "mpi", "nnodes", "nproc_per_node", "num_replicas", "numa_aware", "print_topology", "dry_run",
)  # fmt: skip


@dataclass(frozen=True)
class Elastic:
    """The settings of an elastic job.

    Parameters
    ----------
    np, min_np, max_np : processes at the start; the minimum and the maximum number.
    hosts : with their slots; if `script` is given, it names the hosts.
    script : words of the command that prints hosts. None: they stay the same.
    slots_per_host : for hosts for which the script prints no number.
    cooldown : as `Slots.cooldown`.
    reset_limit : the maximum number of generations after the first; 0: no limit.
    elastic_timeout_s, peer_timeout_s : as those of `ElasticStore`.
    """

    np: int
    min_np: int
    max_np: int
    hosts: Sequence[Host] = ()
    script: Sequence[str] | None = None
    slots_per_host: int | None = None
    cooldown: tuple[float, float] | None = None
    reset_limit: int = 0
    elastic_timeout_s: float = 600.0
    peer_timeout_s: float = 5.0


def add_arguments(
    parser: argparse.ArgumentParser, positive: Callable[[str], int], seconds: Callable[[str], float]
) -> None:
    """Add the flags, in a group of their own."""
    add = parser.add_argument_group(
        "elastic jobs", "With one of the first three flags, the job continues when processes end."
    ).add_argument
    add("--min-np", "--min-num-proc", type=positive, metavar="N",
        help="minimum number of ranks (-np)")  # fmt: skip
    add("--max-np", "--max-num-proc", type=positive, metavar="N", help="maximum number (-np)")
    add("--host-discovery-script", metavar="CMD",
        help="run once a second: prints the hosts to use, a line host:slots each")  # fmt: skip
    add("--slots-per-host", type=positive, metavar="N", help="slots of hosts without a number")
    add("--blacklist-cooldown-range", type=seconds, nargs=2, metavar=("MIN", "MAX"),
        help="a slot rests MIN to 2 MIN seconds after a failure, twice as long after the next one, "
        "at most MAX")  # fmt: skip


def chosen(
    arguments: argparse.Namespace,
    hosts: Callable[[], Sequence[Host]],
    variables: Mapping[str, str],
) -> Elastic | None:
    """Return the given settings, or None if the job is not elastic. ValueError, OSError.

    Parameters
    ----------
    hosts : returns the named hosts.
    variables : for the ranks, including those of this process's environment.
    """
    given = [name for name in _MAKE_ELASTIC if getattr(arguments, name) is not None]
    if not given:
        knobs = knobs_module.chosen(arguments)
        unused = [name for name in _ONLY_ELASTIC if getattr(arguments, name) is not None]
        unused += [name.lower() for name in _ONLY_ELASTIC_KNOBS if f"HORORING_{name}" in knobs]
        if unused:
            raise ValueError(f"{_flag(unused[0])} is for elastic jobs: give --min-np N, too")
        return None
    for name in NOT_ELASTIC:
        if getattr(arguments, name):
            raise ValueError(f"{_flag(name)} cannot be combined with {_flag(given[0])}")
    np = arguments.num_proc or arguments.min_np
    if np is None:
        raise ValueError(f"{_flag(given[0])}: how many ranks at the start? Give -np N")
    min_np, max_np = arguments.min_np or np, arguments.max_np or np
    if not min_np <= np <= max_np:
        raise ValueError(f"--min-np {min_np}, -np {np}, --max-np {max_np}: they must ascend")
    cooldown = arguments.blacklist_cooldown_range
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
        raise ValueError(f"--blacklist-cooldown-range {cooldown[0]:g} {cooldown[1]:g}: they must "
                         "ascend from above 0")  # fmt: skip
    settings = config.load({**environment.variables(), **variables})
    elastic = Elastic(
        np, min_np, max_np,
        slots_per_host=arguments.slots_per_host,
        cooldown=None if cooldown is None else (cooldown[0], cooldown[1]),
        reset_limit=settings["RESET_LIMIT"],
        elastic_timeout_s=settings["ELASTIC_TIMEOUT_S"],
        peer_timeout_s=settings["PEER_TIMEOUT_S"],
    )  # fmt: skip
    if arguments.host_discovery_script is None:
        found = _with_slots(hosts(), arguments.slots_per_host, np)
        slots = sum(host.slots or 0 for host in found)
        if slots < np:
            raise ValueError(f"-np {np}: the hosts have {slots} slots")
        if slots < max_np:
            raise ValueError(
                f"--max-np {max_np}: the hosts have {slots} slots; give them more (-H host:slots, "
                "--slots-per-host), or give --host-discovery-script"
            )
        return replace(elastic, hosts=found)
    if arguments.hosts or arguments.hostfile:
        raise ValueError("--host-discovery-script lists the hosts: give no others")
    try:
        script = shlex.split(arguments.host_discovery_script)
    except ValueError as error:
        raise ValueError(
            f"--host-discovery-script {arguments.host_discovery_script}: {error}"
        ) from None
    if not script:
        raise ValueError("--host-discovery-script: it is empty")
    return replace(elastic, script=script)


def _with_slots(hosts: Sequence[Host], slots: int | None, np: int) -> list[Host]:
    """Give hosts without a number of slots equal numbers."""
    default = slots or -(-np // len(hosts))
    return [host if host.slots is not None else replace(host, slots=default) for host in hosts]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
