"""Network addresses by which the nodes of a cluster job reach one another, checked before the stage starts.

An address that other nodes cannot reach, such as the 127.0.1.1 to which Debian resolves a machine's own name, raises no
error where it is used: the nodes deadlock.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from stages.core.errors import ResourceError

FIRST_MACHINE = "LIFECYCLE_FIRST_MACHINE"
REMEDY = "name the interface that leads to the others in execution.network_interface"


@dataclass(frozen=True)
class Place:
    """Rank of this node in a cluster job, with the rendezvous address and port on the first node.

    first_machine: `this_machine` of the first node, if known.
    """

    rank: int
    address: str
    port: str
    first_machine: str | None = None


def this_machine() -> str:
    """Return an id of this machine, equal for all its processes until it restarts, to tell nodes apart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def address_of(interface: str) -> str:
    """Return the IP address of a network interface of this machine, IPv4 if it has one.

    Raises ResourceError when the interface is absent or has no address.
    """
    interfaces = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [item.address for family in families for item in interfaces.get(interface, ()) if item.family == family]
    if not addresses:
        available = ", ".join(sorted(interfaces))
        raise ResourceError(
            f"execution.network_interface: {socket.gethostname()} has no address on {interface}; it has {available}"
        )
    return addresses[0]


def check_reachable(place: Place, environment: Mapping[str, str]) -> None:
    """Check that this node and the other nodes of the job can reach one another. Raises ResourceError otherwise.

    environment: of the stage's processes; it names the interfaces that they use.
    """
    node = socket.gethostname()
    if is_loopback(place.address):
        if place.first_machine not in (None, this_machine()):
            why = "only the first node itself reaches it; what is its name there, in /etc/hosts?"
            raise ResourceError(f"{node} is to meet the first node at {place.address}: {why} {REMEDY}")
    # Gloo listens there; `address_of` raises for an interface that this node lacks.
    elif interfaces := environment.get("GLOO_SOCKET_IFNAME"):
        for interface in interfaces.split(","):
            address_of(interface)
    elif is_loopback(own := _address_of_own_name(node)):
        raise ResourceError(f"the name of the node {node} resolves to {own}, where no other node reaches it; {REMEDY}")


def is_loopback(address: str) -> bool:
    """Return whether a text is a loopback IP address; host names are not resolved."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _address_of_own_name(node: str) -> str:
    """Return the address that gloo uses for this machine when no interface is named.

    gloo falls back to the loopback interface when the machine's name has no address.
    """
    try:
        return str(socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"
