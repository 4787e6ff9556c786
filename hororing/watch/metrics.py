"""The state of jobs as OpenMetrics, for Prometheus (docs/watching.md lists the names)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

# Name, unit, what it is. Of a rank; counters are totals of its process.
COUNTERS = (
    ("steps", "", "training steps that have ended"),
    ("requests", "", "requests reported to the other ranks"),
    ("batches", "", "batches run"),
    ("tensors", "", "tensors in batches"),
    ("waited", "seconds", "time in which others had not submitted what this rank had"),
    ("batch", "seconds", "time in batches: moving and reducing data"),
    ("blocked", "seconds", "time in which threads of the script waited for results"),
)
OF_RANK = (
    ("late", "seconds", "by how much it is late in a step, now"),
    ("still", "seconds", "time since its last event"),
    ("core", "ratio", "processor time of its threads per time, in cores"),
    ("queued", "ratio", "share of the time in which its main thread waited for a core"),
)
OF_JOB = (
    ("step", "seconds", "time of a step, now"),
    ("samples_per_second", "", "training samples, if the script shows their number"),
    ("overlap", "ratio", "share of communication in which no thread of the script waited"),
    ("ranks", "", "ranks that are seen"),
    ("size", "", "ranks of the job"),
)
OF_LINK = (
    ("link_bytes_per_second", "", "bytes that one rank sends another over TCP"),
    ("link_busy", "ratio", "share of the time in which something was on its way"),
    ("link_round_trip", "seconds", "smoothed round-trip time of the kernel"),
)
FINDINGS = ("hang", "waiting", "late", "link", "slower", "host", "log")
OTHERS = (
    ("moved", "bytes", "inputs of collectives; path: shared_memory, between_hosts, other"),
    ("findings", "", "what the page names; kind: " + ", ".join(FINDINGS)),
    ("script", "", "a number that the script shows, by name"),
    ("host_steal", "ratio", "share of its processor time that the hypervisor takes"),
    ("host_pressure", "ratio", "share of 10 s in which something waited; for: cpu, io, memory"),
)
_PATHS = {
    "shared_memory": ("bytes_shm_direct", "bytes_at_once"),
    "between_hosts": ("bytes_three_phase", "bytes_ring", "bytes_rank_order"),
    "other": ("bytes_other",),
}
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def openmetrics(states: Iterable[dict[str, Any]]) -> bytes:
    """The metrics of these jobs. ImportError without prometheus-client."""
    from prometheus_client.openmetrics.exposition import generate_latest
    from prometheus_client.registry import CollectorRegistry

    families = list(_families([state for state in states if state]))

    class Collector:
        def collect(self) -> Iterator[Any]:
            yield from families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    text: bytes = generate_latest(registry)
    return text


def _families(states: list[dict[str, Any]]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, unit: str, text: str, labels: list[str]) -> Any:
        return GaugeMetricFamily(f"hororing_{name}", text, labels=labels, unit=unit)

    of_rank = ["job", "rank", "host"]
    for name, unit, text in COUNTERS:
        counter = CounterMetricFamily(f"hororing_{name}", text, labels=of_rank, unit=unit)
        field, scale = (f"{name}_ns", 1e9) if unit == "seconds" else (name, 1)
        for labels, rank in _ranks(states):
            counter.add_metric(labels, rank["totals"][field] / scale)
        yield counter
    moved = CounterMetricFamily(
        "hororing_moved", OTHERS[0][2], labels=[*of_rank, "path"], unit="bytes"
    )
    for labels, rank in _ranks(states):
        for path, fields in _PATHS.items():
            moved.add_metric([*labels, path], sum(rank["totals"][each] for each in fields))
    yield moved
    for name, unit, text in OF_RANK:
        family = gauge(name, unit, text, of_rank)
        field = f"{name}_s" if unit == "seconds" else f"{name}_share"
        for labels, rank in _ranks(states):
            family.add_metric(labels, rank[field])
        yield family
    for name, unit, text in OF_JOB:
        family = gauge(name, unit, text, ["job"])
        for state in states:
            value = _of_job(state)[name]
            if value is not None:
                family.add_metric([state["job"]], value)
        yield family
    for name, unit, text in OF_LINK:
        family = gauge(name, unit, text, ["job", "rank", "peer"])
        field = {"link_busy": "busy_share", "link_round_trip": "rtt_s"}.get(name, "bytes_per_s")
        for state in states:
            for link in state["links"]:
                family.add_metric([state["job"], str(link["rank"]), str(link["peer"])], link[field])
        yield family
    yield from _others(states, gauge)


def _others(states: list[dict[str, Any]], gauge: Any) -> Iterator[Any]:
    found = gauge(*OTHERS[1], ["job", "kind"])
    script = gauge(*OTHERS[2], ["job", "name"])
    steal = gauge(*OTHERS[3], ["job", "host"])
    pressure = gauge(*OTHERS[4], ["job", "host", "for"])
    for state in states:
        for kind in FINDINGS:
            count = sum(each["kind"] == kind for each in state["findings"])
            found.add_metric([state["job"], kind], count)
        for name, value in state["metrics"]["values"].items():
            script.add_metric([state["job"], name], value)
        for host in state["hosts"]:
            steal.add_metric([state["job"], host["host"]], host["steal_share"])
            for what in ("cpu", "io", "memory"):
                if (value := host.get(f"{what}_pressure")) is not None:
                    pressure.add_metric([state["job"], host["host"], what], value)
    yield from (found, script, steal, pressure)


def _of_job(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": state["step_s"],
        "samples_per_second": state["samples_per_s"],
        "overlap": state["overlap"],
        "ranks": len(state["ranks"]),
        "size": state["size"],
    }


def _ranks(states: list[dict[str, Any]]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    for state in states:
        for rank in state["ranks"]:
            yield [state["job"], str(rank["rank"]), rank["host"]], rank
