"""An alpha-beta network of hosts, and what an allreduce of hororing and its agreement cost on it.

A message of m bytes takes alpha + m / bandwidth (R. Hockney, 1994). Each rank has an inner link to
the other ranks of its host; the ranks of a host share one NIC, which sends and receives at the same
time. Ranks are ordered by host. The model ignores arithmetic and congestion.

Symbols: P ranks, k ranks per host, H = P / k hosts, S bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Of the core: kHostMessage (csrc/backend/common.h) and latency_bytes (csrc/collective/algorithm.h).
MESSAGE_BYTES = 32 << 10
LATENCY_BYTES = 16 << 10


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


def hosts_of(network: Network, ranks: int) -> tuple[int, int]:
    """Ranks on a host, and hosts; ValueError unless all hosts are full."""
    per_host = min(network.ranks_per_host, ranks)
    if ranks % per_host:
        raise ValueError(f"{ranks} ranks are not full hosts of {per_host}")
    return per_host, ranks // per_host


def exchange(network: Network, ranks: int, nbytes: float, widening: float = 1.0) -> float:
    """Three phases of hororing: each host sends the sum of part h of S directly to host h.

    Host h adds the parts up and returns the result to all, unless sending everything to everybody
    costs less (docs/algorithms.md). S goes in blocks, so the copies within a host, the time that a
    CPU needs for each message, and the wire overlap, except for one block. `widening`: bytes of a
    partial sum per byte of S; 2 for 16-bit floats.
    """
    per_host, hosts = hosts_of(network, ranks)
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


# Rank 0's work for each report of a rank, and for each tensor in it, in seconds; fitted to the real
# coordinator with reports that are combined by host (benchmarks/results/simulate.md).
REPORT_S = 10e-9
TENSOR_S = 3e-9


def agreement(network: Network, ranks: int, tensors: int) -> float:
    """Seconds until all ranks agree on a batch: reports to rank 0, combined by host, and answers.

    A message within a host counts like one between hosts, which is pessimistic.
    """
    per_host, hosts = hosts_of(network, ranks)
    if ranks == 1:
        return 0.0
    alphas = 2 * network.inner_alpha_s + 2 * network.outer_alpha_s * (hosts > 1)
    senders = (per_host - 1) * (1 + (hosts > 1)) + hosts - 1
    counting = ranks * (REPORT_S + tensors * TENSOR_S)
    return alphas + 2 * network.message_overhead_s * senders + counting
