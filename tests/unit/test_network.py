"""Which interface a slot is reached at."""

from __future__ import annotations

import pytest

from horovod_spark_runner.cluster.protocol.network import (
    Interface,
    active_interfaces,
    choose_interface,
    daemon_network,
    mpi_network,
    route_to,
)
from horovod_spark_runner.cluster.slot.node_door import daemon_arguments
from horovod_spark_runner.errors import LaunchError

LO = Interface("lo", "127.0.0.1")
FRONT = Interface("eth0", "192.0.2.7")
BACK = Interface("ib0", "10.1.0.7")
SIX = Interface("eth0", "2001:db8::7")
ALL = [LO, FRONT, BACK, SIX]


def test_the_route_to_the_peers_decides() -> None:
    assert choose_interface(ALL, None, ["10.1.0.7", "192.0.2.7"]) == BACK


def test_loopback_only_when_nothing_leads_outward() -> None:
    assert choose_interface(ALL, None, ["127.0.0.1", "192.0.2.7"]) == FRONT
    assert choose_interface(ALL, None, ["127.0.0.1"]) == LO
    assert choose_interface(ALL, None, []) == LO


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("ib0", BACK),
        ("10.0.0.0/8", BACK),
        ("10.1.0.7", BACK),
        ("eth0", FRONT),  # IPv4 before IPv6
        ("2001:db8::/32", SIX),
    ],
)
def test_a_wish_is_a_name_an_address_or_a_network(wanted: str, expected: Interface) -> None:
    assert choose_interface(ALL, wanted, ["192.0.2.7"]) == expected


def test_a_wish_that_fits_nothing_says_what_there_is() -> None:
    with pytest.raises(LaunchError, match=r"'ib1'.*\bib0 \(10\.1\.0\.7\)"):
        choose_interface(ALL, "ib1", [])


def test_mpi_stays_on_the_interface() -> None:
    assert mpi_network(BACK) == {
        "HSR_ADDRESS": BACK.address,
        "OMPI_MCA_btl_tcp_if_include": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
    }
    assert mpi_network(SIX)["OMPI_MCA_btl_tcp_disable_family"] == "4"
    assert daemon_network(BACK) == {"PRTE_MCA_prte_if_include": "ib0"}


def test_this_machine() -> None:
    assert LO in active_interfaces()
    assert route_to("127.0.0.1") == "127.0.0.1"
    assert route_to("no-such-host.invalid") is None


COMMAND = (
    "PRTE_PREFIX=/a b;export PRTE_PREFIX;LD_LIBRARY_PATH=/x;export LD_LIBRARY_PATH;"
    '/opt/env/bin/prted --leave-session-attached --prtemca ess "env" '
    '--prtemca prte_if_include eth0 --prtemca prte_hnp_uri "ns@0.0;tcp://10.77.0.1:5:24"'
)


def test_the_daemon_command_loses_what_is_another_hosts_own() -> None:
    assert daemon_arguments(COMMAND) == [
        "--leave-session-attached",
        "--prtemca",
        "ess",
        "env",
        "--prtemca",
        "prte_hnp_uri",
        "ns@0.0;tcp://10.77.0.1:5:24",
    ]


def test_an_unknown_daemon_command_is_refused() -> None:
    with pytest.raises(LaunchError, match="program"):
        daemon_arguments("/bin/rm -rf /")
