"""Addresses on which processes listen, read from /proc: for tests that servers are unreachable from other machines."""

import ipaddress
from collections.abc import Iterable, Iterator
from pathlib import Path

LISTENING = "0A"
ACCEPTS = 1 << 16


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """Return `ADDRESS:PORT` of every TCP socket on which one of the given processes listens."""
    sockets = {inode for pid in pids for inode in _sockets_of(pid)}
    return {place for inode, place in _listeners() if inode in sockets}


def reachable_from_elsewhere(pids: Iterable[int]) -> set[str]:
    """Return the addresses, other than loopback ones, on which one of the given processes listens."""
    places = listening_addresses(pids)
    return {place for place in places if not ipaddress.ip_address(place.rpartition(":")[0]).is_loopback}


def unix_listeners(pids: Iterable[int]) -> set[str]:
    """Return the paths of Unix sockets on which the processes listen; `@…` is abstract, and open to local users."""
    sockets = {inode for pid in pids for inode in _sockets_of(pid)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepting = [line for line in lines if int(line[3], 16) & ACCEPTS]
    return {line[7] if len(line) > 7 else "" for line in accepting if line[6] in sockets}


def _sockets_of(pid: int) -> Iterator[str]:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:
        return  # it has ended, or closed the descriptor


def _listeners() -> Iterator[tuple[str, str]]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            if state == LISTENING:
                yield line.split()[9], _place(local)


def _place(local: str) -> str:
    """Return `ADDRESS:PORT` of a hexadecimal socket address in /proc/net/tcp."""
    address, _, port = local.partition(":")
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None)
    return f"{mapped or found}:{int(port, 16)}"
