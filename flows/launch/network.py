"""Where the nodes of a job reach one another, found out on each of them before the stage starts.

An address that the others cannot reach, such as the 127.0.1.1 to which Debian has a machine's own name resolve, is no
error where it is used: all of them wait for one another.
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
    """Which of the nodes this is, and where the first one is reached. first_machine: of `this_machine`, if known."""

    rank: int
    address: str
    port: str
    first_machine: str | None = None


def place_of(environment: Mapping[str, str]) -> Place:
    """This node's place, from the variables of a Slurm step, of a TrainJob, or of an indexed Job."""
    if "SLURM_PROCID" in environment:
        address = environment.get("MASTER_ADDR") or environment["SLURM_LAUNCH_NODE_IPADDR"]
        rank, port = int(environment["SLURM_PROCID"]), environment["MASTER_PORT"]
        return Place(rank, address, port, environment.get(FIRST_MACHINE))
    if "PET_NODE_RANK" in environment:
        address = environment["PET_MASTER_ADDR"]
        return Place(int(environment["PET_NODE_RANK"]), address, environment["PET_MASTER_PORT"])
    return Place(int(environment["JOB_COMPLETION_INDEX"]), environment["MASTER_ADDR"], environment["MASTER_PORT"])


def this_machine() -> str:
    """The same for all processes of a machine until it restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def address_of(interface: str) -> str:
    """Where others reach this machine on an interface, by IPv4 if it can. Raises ResourceError when it has none."""
    found = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [one.address for family in families for one in found.get(interface, ()) if one.family == family]
    if not addresses:
        there = ", ".join(sorted(found))
        raise ResourceError(
            f"execution.network_interface: {socket.gethostname()} has no address on {interface}; it has {there}"
        )
    return addresses[0]


def check_reachable(place: Place, environment: Mapping[str, str]) -> None:
    """Raises ResourceError when this node and the others could not reach one another.

    environment: that of the stage's processes, which says on which interfaces they speak.
    """
    node = socket.gethostname()
    if is_loopback(place.address):
        if place.first_machine not in (None, this_machine()):
            why = "only the first node itself reaches it; what is its name there, in /etc/hosts?"
            raise ResourceError(f"{node} is to meet the first node at {place.address}: {why} {REMEDY}")
    elif interfaces := environment.get("GLOO_SOCKET_IFNAME"):
        for interface in interfaces.split(","):
            address_of(interface)
    elif is_loopback(own := _address_of_own_name(node)):
        raise ResourceError(f"the name of the node {node} resolves to {own}, where no other node reaches it; {REMEDY}")


def is_loopback(address: str) -> bool:
    """Whether an address is of its machine alone; names are not known to be."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _address_of_own_name(node: str) -> str:
    """What gloo takes for the address of a machine where no interface is named: without any, the loopback's."""
    try:
        return str(socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"
