"""Network addresses by which the nodes of a cluster job reach one another, checked before the stage starts.

An address that other nodes cannot reach, such as the 127.0.1.1 to which Debian resolves a machine's own name, raises no
error where it is used: the nodes deadlock.
"""

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
class Rendezvous:
    """Node's rank in a cluster job, with the first node's rendezvous address, port and, if known, `this_machine`."""

    rank: int
    address: str
    port: str
    first_machine: str | None = None


def this_machine() -> str:
    """Return an id of this machine, equal for all its processes until it restarts, to tell nodes apart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def address_of(interface: str) -> str:
    """Return the IP address of a network interface, IPv4 if it has one; raise ResourceError if it has none."""
    interfaces = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [item.address for family in families for item in interfaces.get(interface, ()) if item.family == family]
    if not addresses:
        available = ", ".join(sorted(interfaces))
        raise ResourceError(
            f"execution.network_interface: {socket.gethostname()} has no address on {interface}; it has {available}"
        )
    return addresses[0]


def check_reachable(place: Rendezvous, environment: Mapping[str, str]) -> None:
    """Check that the job's nodes can reach one another by its `environment`'s interfaces; else raise ResourceError."""
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
    """Return the address that gloo uses without a named interface: loopback if the machine's name has no address."""
    try:
        return str(socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"
