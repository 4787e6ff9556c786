"""An alpha-beta network of hosts, and the cost of an allreduce on it, by algorithm.

A message of m bytes takes alpha + m / bandwidth (R. Hockney, 1994). Each rank has an inner link to
the other ranks of its host; the ranks of a host share one NIC, which sends and receives at the same
time. Ranks are ordered by host. The model ignores arithmetic and congestion.

Symbols: P ranks, k ranks per host, H = P / k hosts, S bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Network(NamedTuple):
    """Seconds per message and bytes per second, within a host and between hosts."""

    name: str
    ranks_per_host: int
    inner_alpha_s: float
    inner_bandwidth: float
    outer_alpha_s: float
    outer_bandwidth: float
    message_overhead_s: float  # CPU time of one small message, on either side
    source: str


def _hosts(network: Network, ranks: int) -> tuple[int, int]:
    per_host = min(network.ranks_per_host, ranks)
    if ranks % per_host:
        raise ValueError(f"{ranks} ranks are not full hosts of {per_host}")
    return per_host, ranks // per_host


def ring(network: Network, ranks: int, nbytes: float) -> float:
    """2 (P-1) steps of S / P bytes; with several hosts, each is as slow as the NICs."""
    _, hosts = _hosts(network, ranks)
    if ranks == 1:
        return 0.0
    outside = hosts > 1
    alpha = network.outer_alpha_s if outside else network.inner_alpha_s
    bandwidth = network.outer_bandwidth if outside else network.inner_bandwidth
    return 2 * (ranks - 1) * (alpha + nbytes / ranks / bandwidth)


def rings_of_hosts(network: Network, ranks: int, nbytes: float) -> float:
    """Reduce-scatter in the host, k rings of S / k bytes between hosts, all-gather in the host.

    One phase after the other, as HOROVOD_HIERARCHICAL_ALLREDUCE does. The rings share the NIC, so
    together they move what one ring of S bytes would.
    """
    per_host, hosts = _hosts(network, ranks)
    inner = (
        2 * (per_host - 1) * (network.inner_alpha_s + nbytes / per_host / network.inner_bandwidth)
    )
    outer = 2 * (hosts - 1) * (network.outer_alpha_s + nbytes / hosts / network.outer_bandwidth)
    return inner + outer


def exchange(network: Network, ranks: int, nbytes: float, widening: float = 1.0) -> float:
    """Three phases of hororing: each host sends the sum of part h of S directly to host h.

    Host h adds the parts up and returns the result to all, unless sending everything to everybody
    costs less (docs/algorithms.md). S goes in blocks, so the copies within a host, the time that a
    CPU needs for each message, and the wire overlap, except for one block. `widening`: bytes of a
    partial sum per byte of S; 2 for 16-bit floats.
    """
    per_host, hosts = _hosts(network, ranks)
    if ranks == 1:
        return 0.0
    others, partial = hosts - 1, nbytes * widening
    phases = [partial / hosts, nbytes / hosts]  # bytes that a host sends to another one
    if others * partial <= others * sum(phases) + LATENCY_BYTES:
        phases = [partial]
    blocks = max(1, math.ceil(nbytes / (ranks * MESSAGE_BYTES)))
    messages = others * blocks * len(phases)  # of a rank
    stages = [
        2 * (per_host - 1) / per_host * nbytes / network.inner_bandwidth,
        2 * messages * network.message_overhead_s,
        others * sum(phases) / network.outer_bandwidth,
    ]
    alphas = 2 * network.inner_alpha_s + (len(phases) * network.outer_alpha_s if others else 0.0)
    return alphas + max(stages) + (sum(stages) - max(stages)) / blocks


# Of the core: kHostMessage (csrc/backend/common.h) and latency_bytes (csrc/collective/algorithm.h).
MESSAGE_BYTES = 32 << 10
LATENCY_BYTES = 16 << 10


RDMA = Network(
    "100 Gbit/s RDMA, 8 ranks per host", 8, 5e-6, 10e9, 15e-6, 12.5e9, 1e-6,
    "assumed: typical of PCIe and RoCE hosts of the time of the published curves",
)  # fmt: skip
TCP = Network(
    "25 Gbit/s TCP, 4 ranks per host", 4, 10e-6, 10e9, 30e-6, 25e9 / 8, 4e-6,
    "latency from Shi and Chu's fit on 16 nodes, 0.908 ms for 30 steps (MG-WFBP, INFOCOM 2019); "
    "bandwidth nominal; 4 us per message: an allreduce of 8 bytes over TCP takes 8 us here",
)  # fmt: skip
