"""The network between hosts under mpirun. Push tier, 4 s: one job of three ranks."""

from __future__ import annotations

from pathlib import Path

import mpirun
import pretend_hosts
import pytest

from hororing._job import networks as job_networks
from hororing._job.rendezvous import interfaces

# Three engines, one after the other, on two hosts. First all ranks claim a fast network, then only
# rank 0, which does not matter if the user chooses the transport.
SCRIPT = """
import os

import numpy as np
import hororing._job.networks
import hororing.numpy as hvd

has = True
for transport in ("auto", "auto", "mpi"):
    os.environ["HORORING_TRANSPORT"] = transport
    hororing._job.networks.fast = lambda _: "mlx5_0" if has else ""
    hvd.init()
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [3.0] * 3
    has = hvd.rank() == 0
    hvd.shutdown()
"""


def port(root: Path, device: str, state: str) -> None:
    folder = root / "sys/class/infiniband" / device / "ports/1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(state)


def test_a_port_that_is_up_and_can_be_opened_is_a_fast_network(tmp_path: Path):
    assert job_networks.fast({}, tmp_path) == ""
    port(tmp_path, "mlx5_0", "1: DOWN\n")
    port(tmp_path, "mlx5_1", "4: ACTIVE\n")
    assert job_networks.fast({}, tmp_path) == ""  # a container without its device files
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs1").touch()
    assert job_networks.fast({}, tmp_path) == "mlx5_1"
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    assert job_networks.fast({}, tmp_path) == "cxi0"


def test_what_the_user_tells_open_mpi_counts_more(tmp_path: Path):
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    assert job_networks.fast({"OMPI_MCA_pml": "ob1"}, tmp_path) == ""
    assert job_networks.fast({"OMPI_MCA_pml": "ucx"}, tmp_path / "none") == "OMPI_MCA_pml=ucx"
    assert job_networks.fast({"OMPI_MCA_pml": ""}, tmp_path) == "cxi0"


def test_tcp_takes_the_network_that_open_mpi_is_told_to_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        interfaces, "addresses", lambda: ["10.1.0.7", "192.168.3.4", "127.0.0.1", "h"]
    )

    def address(networks: str) -> str:
        return job_networks.tcp_address({"OMPI_MCA_btl_tcp_if_include": networks})

    assert job_networks.tcp_address({}) == "10.1.0.7"
    assert address("192.168.0.0/16") == "192.168.3.4"
    assert address("172.16.0.0/12,192.168.3.0/24") == "192.168.3.4"
    assert address("lo") == "127.0.0.1"
    assert address("no_such_0,nonsense/3") == "10.1.0.7"


def test_tcp_takes_the_first_network_of_several_that_the_host_has():
    assert interfaces.chosen("lo") == interfaces.chosen("absent0, lo,absent1") == "127.0.0.1"
    assert interfaces.chosen("192.0.2.1,127.0.0.1") == "127.0.0.1"
    assert interfaces.chosen("192.0.2.1") == "192.0.2.1"  # of a host behind address translation
    with pytest.raises(ValueError, match="HORORING_INTERFACE=absent0,absent1: no such network"):
        interfaces.chosen("absent0,absent1")


@pytest.mark.skipif(bool(pretend_hosts.why_not()), reason=pretend_hosts.why_not())
def test_mpi_connects_hosts_only_where_all_have_a_fast_network(tmp_path: Path):
    script = tmp_path / "lives.py"
    script.write_text(SCRIPT)
    job = mpirun.run(script, 3, names="a,a,b", environment={"HORORING_LOG_LEVEL": "debug"})
    assert job.returncode == 0, job.report()
    for printed in job.outputs:
        first, second, third = (line for line in printed.splitlines() if "; transport " in line)
        assert "transport mpi, since all hosts have a network for it, such as mlx5_0;" in first
        assert "transport tcp, since rank 1 has no network that MPI uses better" in second
        assert "transport mpi, since HORORING_TRANSPORT says so" in third
        assert "backends hierarchical" in third  # ranks of one host share memory
