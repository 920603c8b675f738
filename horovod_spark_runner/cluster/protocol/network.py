"""Identity of this host, and the address at which other hosts reach it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from ...errors import LaunchError
from ...machine import boot_id

LOOPBACK = "127.0.0.1"
# Variable with the IP address at which other hosts reach a rank.
ADDRESS = "HSR_ADDRESS"


@dataclass(frozen=True)
class Interface:
    """A network interface of this host and one of its addresses."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def choose_interface(
    interfaces: Sequence[Interface], wanted: str | None, routed: Iterable[str]
) -> Interface:
    """Return the interface for connections between hosts. Pure.

    Args:
        interfaces: the interfaces of this host.
        wanted: an interface's name, an address, or a network such as ``10.0.0.0/8``; ``None`` to
            follow the routes.
        routed: addresses of this host on the routes to its peers, the best evidence first; read
            only as far as needed.

    Raises:
        LaunchError: no interface fits ``wanted``.
    """
    if wanted is not None:
        fitting = [interface for interface in interfaces if _fits(interface, wanted)]
        if not fitting:
            names = ", ".join(f"{entry.name} ({entry.address})" for entry in interfaces)
            raise LaunchError(
                f"network_interface={wanted!r} fits no interface of host {socket.gethostname()}; "
                f"it has {names}"
            )
        return min(fitting, key=lambda interface: ":" in interface.address)
    by_address = {interface.address: interface for interface in interfaces}
    loopback: Interface | None = None
    for address in routed:
        interface = by_address.get(address)
        if interface is not None and not interface.is_loopback:
            return interface
        loopback = loopback or interface
    return loopback or Interface("lo", LOOPBACK)


def active_interfaces() -> list[Interface]:
    """Return this host's interfaces that are up, one entry per address."""
    up = psutil.net_if_stats()
    interfaces = []
    for name, addresses in psutil.net_if_addrs().items():
        if name in up and not up[name].isup:
            continue
        for entry in addresses:
            # A link-local address needs its scope to be used, which peers do not share.
            is_ip = entry.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and not entry.address.startswith("fe80"):
                interfaces.append(Interface(name, entry.address))
    return interfaces


def route_to(host: str) -> str | None:
    """Return this host's address on the route to ``host``; sends nothing."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def family_of(address: str) -> socket.AddressFamily:
    """Return the socket family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def mpi_network(interface: Interface) -> dict[str, str]:
    """Return the environment that keeps the ranks' traffic on ``interface``. Pure."""
    family = {"OMPI_MCA_btl_tcp_disable_family": "4"} if ":" in interface.address else {}
    return {
        **family,
        ADDRESS: interface.address,
        "OMPI_MCA_btl_tcp_if_include": interface.name,
        "NCCL_SOCKET_IFNAME": f"={interface.name}",  # without it, eth1 means eth10, too
    }


def daemon_network(interface: Interface) -> dict[str, str]:
    """Return the environment that keeps MPI's daemons on ``interface``. Pure."""
    return {"PRTE_MCA_prte_if_include": interface.name}


def _fits(interface: Interface, wanted: str) -> bool:
    if interface.name == wanted:
        return True
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False
    return ipaddress.ip_address(interface.address) in network


def node_identity() -> str:
    """Return an identity that is equal for slots that share their machine's network and files.

    Containers may share the network (of a pod or of their host) but not the files: then they do not
    find each other's sockets and shared memory.
    """
    spaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "mnt", "ipc"))
    return "/".join([boot_id(), *spaces])
