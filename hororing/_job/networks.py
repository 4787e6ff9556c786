"""Networks between hosts: whether MPI has a faster one than TCP, and which one TCP uses.

Under mpirun several hosts communicate over TCP, unless all of them have a network that MPI uses
without TCP: InfiniBand, RoCE, Omni-Path, EFA or Slingshot. HORORING_TRANSPORT overrides it.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from hororing._job.rendezvous import interfaces

# Layers of Open MPI that use such networks; with any other one it uses TCP.
_FAST_LAYERS = ("ucx", "cm")


def fast(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return a network of this host that MPI uses faster than TCP, such as "mlx5_0", or "".

    OMPI_MCA_pml, if the user sets it, decides; otherwise devices that are up and can be opened.
    """
    if layer := environ.get("OMPI_MCA_pml", ""):
        return f"OMPI_MCA_pml={layer}" if layer in _FAST_LAYERS else ""
    for device in sorted(root.glob("sys/class/cxi/cxi*")):  # Slingshot
        return device.name
    if not any(root.glob("dev/infiniband/uverbs*")):  # for example not passed to this container
        return ""
    for state in sorted(root.glob("sys/class/infiniband/*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                return state.parents[2].name
    return ""


def tcp_address(environ: Mapping[str, str]) -> str:
    """The address at which a rank that mpirun started is reached by TCP.

    If OMPI_MCA_btl_tcp_if_include names a network (a name or a range of addresses), the address
    there; otherwise that of the default route.
    """
    for network in filter(None, environ.get("OMPI_MCA_btl_tcp_if_include", "").split(",")):
        if "/" not in network:
            with contextlib.suppress(ValueError):
                return interfaces.chosen(network)
            continue
        with contextlib.suppress(ValueError):
            of_range = ipaddress.ip_network(network, strict=False)
            for address in interfaces.addresses()[:-1]:  # without the name
                if ipaddress.ip_address(address) in of_range:
                    return address
    return interfaces.reached_at()
