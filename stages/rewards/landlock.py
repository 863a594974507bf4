"""What this process, and every one that it starts, may no longer do: open files, and look into other processes.

Linux' Landlock, which needs no privileges (Linux 5.13 and later; https://docs.kernel.org/userspace-api/landlock.html).
Standard library only: the programs that run code of others import it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, on every architecture."""
VERSION_ONLY = 1
PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS = 38
CAPABILITIES_3 = 0x20080522
CAP_SYS_ADMIN, CAP_PERFMON = 21, 38

EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_DEVICE = 1 << 11
READING = EXECUTE | READ_FILE | READ_FOLDER
NUM_RIGHTS = (0, 13, 14, 15, 15, 16)
"""Of files, by Landlock's version; later ones have as many as the last."""
NETWORK_VERSION, SCOPE_VERSION = 4, 6
"""The first with rights of the network, and with scopes."""
BIND_AND_CONNECT = 0b11
ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """0 where there is no Landlock."""
    return max(int(_libc.syscall(CREATE_RULESET, None, 0, VERSION_ONLY)), 0)


def hide_other_processes() -> None:
    """Have the kernel keep the memory and the environment of all processes that run already from this one.

    Raises OSError where there is no Landlock.
    """
    _restrict(struct.pack("Q", MAKE_DEVICE), {})  # any rule makes a domain, which sees no process outside it
    _drop_capabilities(CAP_SYS_ADMIN, CAP_PERFMON)  # with which root would see them all the same


def restrict_files(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Let files be opened beneath these paths alone, of which those that are missing do not count.

    Where the kernel can, no TCP port is opened either, and no signal sent to a process that was not restricted with
    this one. Owners, modes and times of files, and on Linux before 6.2 their length, are not Landlock's: system calls
    that change these must be refused besides. Raises OSError where there is no Landlock.
    """
    known = version()
    every_right = (1 << NUM_RIGHTS[min(known, len(NUM_RIGHTS) - 1)]) - 1
    attributes = struct.pack("Q", every_right)
    attributes += struct.pack("Q", BIND_AND_CONNECT) if known >= NETWORK_VERSION else b""
    attributes += struct.pack("Q", ABSTRACT_SOCKETS_AND_SIGNALS) if known >= SCOPE_VERSION else b""
    allowed = dict.fromkeys(readable, READING) | dict.fromkeys(writable, every_right & ~EXECUTE)
    _restrict(attributes, {path: rights for path, rights in allowed.items() if path.exists()})


def _restrict(attributes: bytes, allowed: dict[Path, int]) -> None:
    """attributes: `struct landlock_ruleset_attr`, as much of it as the kernel knows."""
    rules = _checked(_libc.syscall(CREATE_RULESET, attributes, len(attributes), 0))
    for path, rights in allowed.items():
        opened = os.open(path, os.O_PATH)
        of_kind = rights if path.is_dir() else rights & (EXECUTE | WRITE_FILE | READ_FILE)
        _checked(_libc.syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", of_kind, opened), 0))
        os.close(opened)
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_libc.syscall(RESTRICT_SELF, rules, 0))
    os.close(rules)


def _drop_capabilities(*dropped: int) -> None:
    header = struct.pack("Ii", CAPABILITIES_3, 0)
    sets = ctypes.create_string_buffer(24)  # effective, permitted and inheritable: the lower 32 of each, then the upper
    _checked(_libc.capget(header, sets))
    values = list(struct.unpack("6I", sets.raw))
    for number in dropped:
        for kind in range(3):
            values[3 * (number // 32) + kind] &= ~(1 << number % 32)
    _checked(_libc.capset(header, struct.pack("6I", *values)))


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(answer)
