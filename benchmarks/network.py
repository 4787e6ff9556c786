"""Networks, and the cost of an allreduce on them by the algorithms of others and by ours.

The model is that of `hororing.toolkit.predict`. Symbols: P ranks, k ranks per host, H = P / k
hosts, S bytes.
"""

from __future__ import annotations

from hororing.toolkit.predict.network import Network, exchange, hosts_of

__all__ = ["RDMA", "TCP", "Network", "exchange", "ring", "rings_of_hosts"]


def ring(network: Network, ranks: int, nbytes: float) -> float:
    """2 (P-1) steps of S / P bytes; with several hosts, each is as slow as the NICs."""
    _, hosts = hosts_of(network, ranks)
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
    per_host, hosts = hosts_of(network, ranks)
    inner = (
        2 * (per_host - 1) * (network.inner_alpha_s + nbytes / per_host / network.inner_bandwidth)
    )
    outer = 2 * (hosts - 1) * (network.outer_alpha_s + nbytes / hosts / network.outer_bandwidth)
    return inner + outer


RDMA = Network(
    "100 Gbit/s RDMA, 8 ranks per host", 8, 5e-6, 10e9, 15e-6, 12.5e9, 1e-6,
    "assumed: typical of PCIe and RoCE hosts of the time of the published curves",
)  # fmt: skip
TCP = Network(
    "25 Gbit/s TCP, 4 ranks per host", 4, 10e-6, 10e9, 30e-6, 25e9 / 8, 4e-6,
    "latency from Shi and Chu's fit on 16 nodes, 0.908 ms for 30 steps (MG-WFBP, INFOCOM 2019); "
    "bandwidth nominal; 4 us per message: an allreduce of 8 bytes over TCP takes 8 us here",
)  # fmt: skip
