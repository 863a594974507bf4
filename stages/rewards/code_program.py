"""Program of the code sandbox: confines its own process, then runs a model's code with tests in it.

`python -m stages.rewards.code_program LIMITS`; LIMITS is JSON: `cpu_s`, `memory_bytes`, `file_bytes`. Standard input is
JSON: `code`, `tests` (texts), and `word`, which is written to the original standard output when all tests have passed:
code that ends the process early has not passed. Without `tests`, what the code prints is written there instead, and the
error that ended it. Where the limits cannot be set, the reason is written instead, and nothing is run.

The code starts no other process and no thread, opens no connection, writes only to its first working folder, and reads
Python and the system's libraries, but no other process's environment. Files are confined by Landlock, which needs no
privileges (Linux 5.13 and later; https://docs.kernel.org/userspace-api/landlock.html), system calls by seccomp
(https://man7.org/linux/man-pages/man2/seccomp.2.html) through libseccomp, which knows the calls of each architecture.
Standard library only: other programs that run people's code import this module, too.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

PERMITTED = """
    access alarm brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range dup dup2 dup3
    epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 exit exit_group faccessat faccessat2 fadvise64
    fchdir fdatasync flock fstat fstatfs fsync ftruncate futex getcwd getdents64 getegid geteuid getgid getgroups
    getitimer getpgid getpgrp getpid getppid getrandom getresgid getresuid getrlimit getrusage getsid gettid
    gettimeofday getuid lseek lstat madvise membarrier mprotect mremap msync munmap nanosleep
    newfstatat pause pipe pipe2 poll ppoll pread64 preadv pselect6 pwrite64 pwritev read readlink readlinkat readv
    rename renameat renameat2 restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn
    rt_sigsuspend rt_sigtimedwait sched_getaffinity sched_yield select sendfile set_robust_list setitimer sigaltstack
    stat statfs statx symlink symlinkat sysinfo time times umask uname unlink unlinkat write writev
"""
"""System calls that model-written code may make: those of programs that compute, and read and write files.

Not those that open connections, start processes or threads, make folders, touch other processes or the rights of files,
or let files grow without being written (`fallocate`, shared mappings)."""
FCNTL_COMMANDS = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL),
    *(fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW),
)
"""Commands of fcntl that the sandbox permits, besides F_SETFL without O_ASYNC.

Others (F_SETOWN, F_SETSIG, F_NOTIFY, F_SETLEASE) make the kernel send signals, SIGKILL included, to any process of the
user."""
IOCTL_COMMANDS = (0x5450, 0x5451, 0x5421)
"""Commands of ioctl that the sandbox permits: FIONCLEX, FIOCLEX, FIONBIO, by which Python sets flags of descriptors.

FIOSETOWN and FIOASYNC do what F_SETOWN does."""
NAMELESS = os.O_TMPFILE & ~os.O_DIRECTORY
WRITING = os.O_ACCMODE | NAMELESS
"""Flags of open(2) that are checked; a nameless file (O_TMPFILE) would escape the limits on its folder."""
READ_WITHOUT_TRUNCATION = WRITING | os.O_TRUNC
"""Flags of open(2) that the sandbox checks for reading: O_TRUNC too, as Landlock before Linux 6.2 allows truncation."""
SHARING = mmap.MAP_SHARED | mmap.MAP_PRIVATE

ALLOW, REFUSE, NOTIFY = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x7FC00000
RECEIVE_NOTICE, ANSWER_NOTICE = 0xC0502100, 0xC0182101
"""Commands of ioctl by which a process takes and answers the kernel's questions about another's system calls."""
NOTICE_BYTES, CONTINUE = 80, 1
NOTIFY_API = 6
"""Level of libseccomp's API that it finds in kernels from 5.7 on; permitting a call by an answer needs Linux 5.5."""
EQUAL, GREATER, MASKED_EQUAL = 4, 6, 7
TSYNC = 4
"""Attribute of libseccomp's filters (SCMP_FLTATR_CTL_TSYNC) by which all threads of the process get it."""


class ArgumentCondition(ctypes.Structure):
    """Condition on an argument of a system call, in libseccomp's layout (`struct scmp_arg_cmp`).

    For MASKED_EQUAL the call's argument `arg` & `first` must equal `second`; for EQUAL it must equal `first`.
    """

    _fields_ = [
        ("arg", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


def permit_computing_only() -> None:
    """Make system calls that computing does not need fail with EPERM from now on; OSError without seccomp."""
    library, calls = _new_filter(REFUSE)

    def permit(name: str, where: Iterable[ArgumentCondition] = ()) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # an architecture without this call
            return
        given = tuple(where)
        _checked_seccomp(
            library.seccomp_rule_add_array(calls, ALLOW, number, len(given), (ArgumentCondition * len(given))(*given))
        )

    for name in PERMITTED.split():
        permit(name)
    for name, flags in (("open", 1), ("openat", 2)):
        # Several rules for one call are alternatives: it is allowed if any of them matches.
        permit(name, [ArgumentCondition(flags, MASKED_EQUAL, READ_WITHOUT_TRUNCATION, os.O_RDONLY)])
        permit(name, [ArgumentCondition(flags, MASKED_EQUAL, WRITING, os.O_WRONLY)])
        permit(name, [ArgumentCondition(flags, MASKED_EQUAL, WRITING, os.O_RDWR)])
    for command in FCNTL_COMMANDS:
        permit("fcntl", [ArgumentCondition(1, EQUAL, command)])
    permit("fcntl", [ArgumentCondition(1, EQUAL, fcntl.F_SETFL), ArgumentCondition(2, MASKED_EQUAL, os.O_ASYNC, 0)])
    for command in IOCTL_COMMANDS:
        permit("ioctl", [ArgumentCondition(1, EQUAL, command)])
    # private, or of no file: a shared mapping would write to a file past the limits on what is written
    permit("mmap", [ArgumentCondition(3, MASKED_EQUAL, SHARING, mmap.MAP_PRIVATE)])
    permit("mmap", [ArgumentCondition(3, MASKED_EQUAL, mmap.MAP_ANONYMOUS, mmap.MAP_ANONYMOUS)])
    permit("prlimit64", [ArgumentCondition(0, EQUAL, 0), ArgumentCondition(2, EQUAL, 0)])  # reading its own limits
    permit("tgkill", [ArgumentCondition(0, EQUAL, os.getpid())])  # abort(): a signal to itself
    # Threads that are there already, such as those of a library or of imported code, get the same filter.
    _checked_seccomp(library.seccomp_attr_set(calls, TSYNC, 1))
    # From here on this process cannot take any of it back, nor can what it runs.
    _checked_seccomp(library.seccomp_load(calls))
    library.seccomp_release(calls)


def permit_tcp_only() -> None:
    """Make this process's sockets TCP's alone from now on: no other has Landlock's rule of ports; OSError without it.

    Neither UDP, nor Unix sockets, by which a service of this machine may be reached, nor MPTCP. Pairs of sockets stay.
    io_uring, which opens sockets past this filter, is refused too.
    """
    library, calls = _new_filter(ALLOW)

    def refuse(name: str, *where: ArgumentCondition) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        conditions = (ArgumentCondition * len(where))(*where)
        _checked_seccomp(library.seccomp_rule_add_array(calls, REFUSE, number, len(where), conditions))

    for family in range(socket.AF_INET6 + 1):
        if family not in (socket.AF_INET, socket.AF_INET6):
            refuse("socket", ArgumentCondition(0, EQUAL, family))
    refuse("socket", ArgumentCondition(0, GREATER, socket.AF_INET6))
    for kind in range(16):
        if kind != socket.SOCK_STREAM:
            refuse("socket", ArgumentCondition(1, MASKED_EQUAL, 0xF, kind))
    for protocol in range(1, socket.IPPROTO_TCP):
        refuse("socket", ArgumentCondition(2, EQUAL, protocol))
    refuse("socket", ArgumentCondition(2, GREATER, socket.IPPROTO_TCP))
    refuse("io_uring_setup")
    _checked_seccomp(library.seccomp_load(calls))
    library.seccomp_release(calls)


def report_new_processes() -> int:
    """Make the kernel ask before this process, or one that it starts, starts another or a thread; OSError if it cannot.

    Returns the descriptor for `answer_new_process` in another process; once none has it, no process can be started.
    """
    library, calls = _new_filter(ALLOW)
    for name in ("clone", "clone3", "fork", "vfork"):
        if (number := library.seccomp_syscall_resolve_name(name.encode())) >= 0:
            _checked_seccomp(library.seccomp_rule_add_array(calls, NOTIFY, number, 0, None))
    _checked_seccomp(library.seccomp_load(calls))
    descriptor = os.dup(_checked_seccomp(library.seccomp_notify_fd(calls)))
    library.seccomp_release(calls)
    return descriptor


def can_report_new_processes() -> bool:
    """Return whether this kernel and libseccomp can ask another process, which `report_new_processes` needs."""
    try:
        return int(ctypes.CDLL("libseccomp.so.2").seccomp_api_get()) >= NOTIFY_API
    except OSError:
        return False


def answer_new_process(descriptor: int, is_allowed: Callable[[], bool]) -> None:
    """Answer one question of the kernel: EAGAIN where no further process is allowed."""
    question = bytearray(NOTICE_BYTES)
    try:
        fcntl.ioctl(descriptor, RECEIVE_NOTICE, question)
        (number,) = struct.unpack_from("Q", question)
        error, flags = (0, CONTINUE) if is_allowed() else (-errno.EAGAIN, 0)
        fcntl.ioctl(descriptor, ANSWER_NOTICE, struct.pack("QqiI", number, 0, error, flags))
    except FileNotFoundError:  # what asked has ended, or was interrupted and asks again
        return


def _new_filter(otherwise: int) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Return libseccomp and a filter without rules. otherwise: what becomes of a call that has no rule."""
    library = ctypes.CDLL("libseccomp.so.2")
    # a pointer: by default ctypes cuts results to 32 bits
    library.seccomp_init.restype = ctypes.c_void_p
    calls = ctypes.c_void_p(library.seccomp_init(otherwise))
    if not calls:
        raise OSError(errno.ENOSYS, "seccomp_init failed")
    return library, calls


def _checked_seccomp(answer: int) -> int:
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of Landlock's system calls, the same on every architecture."""
VERSION_ONLY = 1
PATH_BENEATH, PORT = 1, 2
PR_SET_NO_NEW_PRIVS = 38
CAPABILITIES_3 = 0x20080522
CAP_SYS_ADMIN, CAP_PERFMON = 21, 38

EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_DEVICE = 1 << 11
READING = EXECUTE | READ_FILE | READ_FOLDER
NUM_RIGHTS = (0, 13, 14, 15, 15, 16)
"""Number of file access rights in each version of Landlock, from version 0; later versions have as many as the last."""
NETWORK_VERSION, SCOPE_VERSION = 4, 6
"""First versions of Linux's Landlock that can restrict network connections (4) and signals to other processes (6)."""
BIND, CONNECT = 0b01, 0b10
ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
FREE_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the range of the ports that the kernel gives to servers that ask for any."""

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 where there is none."""
    return max(int(_libc.syscall(CREATE_RULESET, None, 0, VERSION_ONLY)), 0)


def hide_other_processes() -> None:
    """Keep this process from other processes' memory and environment; raise OSError without Landlock."""
    _restrict(struct.pack("Q", MAKE_DEVICE), {}, {})  # any rule makes a domain, which sees no process outside it
    _drop_capabilities(CAP_SYS_ADMIN, CAP_PERFMON)  # with which root would see them all the same


def restrict_files(readable: Iterable[Path], writable: Iterable[Path], ports: Mapping[int, int] | None = None) -> None:
    """Restrict this process by Landlock to files beneath these paths; missing paths are ignored.

    Where the kernel can, no TCP port is opened either, but for what `ports` permits: BIND or CONNECT by the number of
    the port. Nor is a signal sent beyond this restriction. Landlock does not cover owners, modes and times of files,
    nor before Linux 6.2 their length: such system calls must be refused too. Raises OSError where there is no Landlock.
    """
    known = landlock_version()
    # Only rights that this kernel knows: it refuses a ruleset with an unknown bit.
    every_right = (1 << NUM_RIGHTS[min(known, len(NUM_RIGHTS) - 1)]) - 1
    attributes = struct.pack("Q", every_right)
    attributes += struct.pack("Q", BIND | CONNECT) if known >= NETWORK_VERSION else b""
    attributes += struct.pack("Q", ABSTRACT_SOCKETS_AND_SIGNALS) if known >= SCOPE_VERSION else b""
    allowed = dict.fromkeys(readable, READING) | dict.fromkeys(writable, every_right & ~EXECUTE)
    _restrict(attributes, {path: rights for path, rights in allowed.items() if path.exists()}, ports or {})


def ports_of_own_servers() -> dict[int, int]:
    """Return what a process needs that connects to servers of its own: the system's free ports, and any of them."""
    first, last = map(int, FREE_PORTS.read_text().split())
    return {0: BIND, **dict.fromkeys(range(first, last + 1), CONNECT)}


def _restrict(attributes: bytes, allowed: dict[Path, int], ports: Mapping[int, int]) -> None:
    """Make a Landlock ruleset and restrict this process's file access by it.

    attributes: `struct landlock_ruleset_attr`, as much of it as the kernel knows.
    """
    rules = _checked_errno(_libc.syscall(CREATE_RULESET, attributes, len(attributes), 0))
    for path, rights in allowed.items():
        opened = os.open(path, os.O_PATH)
        # The kernel refuses rights of folders, such as listing, in the rule of a file.
        of_kind = rights if path.is_dir() else rights & (EXECUTE | WRITE_FILE | READ_FILE)
        # `=`: the kernel's `struct landlock_path_beneath_attr` is packed, 12 bytes without padding.
        _checked_errno(_libc.syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", of_kind, opened), 0))
        os.close(opened)
    for port, rights in ports.items():
        _checked_errno(_libc.syscall(ADD_RULE, rules, PORT, struct.pack("QQ", rights, port), 0))
    # Landlock and seccomp ask for it of a process without privileges: no setuid program may get more rights.
    _checked_errno(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked_errno(_libc.syscall(RESTRICT_SELF, rules, 0))
    os.close(rules)


def _drop_capabilities(*dropped: int) -> None:
    header = struct.pack("Ii", CAPABILITIES_3, 0)
    sets = ctypes.create_string_buffer(24)  # effective, permitted and inheritable: the lower 32 of each, then the upper
    _checked_errno(_libc.capget(header, sets))
    values = list(struct.unpack("6I", sets.raw))
    for number in dropped:
        for kind in range(3):
            # capability 38 is bit 6 of the upper words, 3 to 5
            values[3 * (number // 32) + kind] &= ~(1 << number % 32)
    _checked_errno(_libc.capset(header, struct.pack("6I", *values)))


def _checked_errno(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(answer)


PR_SET_PDEATHSIG = 1
NUM_OPEN_FILES = 32
READABLE = (
    *(Path(path) for path in (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64")),
    *(Path("/etc") / name for name in ("ld.so.cache", "localtime")),
    *(Path("/dev") / name for name in ("zero", "random", "urandom")),
)


def main(limits: str) -> None:
    """Confine this process, run the code with its tests, and output the parent's secret word if all passed.

    limits: JSON of `cpu_s`, `memory_bytes` and `file_bytes`.
    """
    # all of it, before the standard streams become /dev/null
    asked = json.load(sys.stdin)
    answers = os.dup(1)  # the code gets /dev/null as its standard streams, unless its output is asked for
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    try:
        confine(**json.loads(limits), writable=[Path.cwd(), Path(os.devnull)])
    except (OSError, ValueError) as error:  # ValueError: a limit above the one that is set already
        os.write(answers, f"{type(error).__name__}: {error}".encode())
        return
    if "tests" not in asked:
        os.dup2(answers, 1)
        os.dup2(answers, 2)
        try:
            _print(asked["code"])
        except BaseException:  # of streams that the code changed; a traceback would show this program
            os._exit(1)
    elif _passes(asked["code"], asked["tests"]):
        os.write(answers, asked["word"].encode())
    os._exit(0)  # what the code left for the end is not run


def confine(cpu_s: int, memory_bytes: int, file_bytes: int, writable: Iterable[Path]) -> None:
    """Take from this process what code of a model must not have. Raises OSError where the kernel cannot, ValueError."""
    # A parent that is killed cannot end this process, so the kernel does.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: NUM_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        # soft and hard: the code cannot raise them again
        resource.setrlimit(limit, (value, value))
    restrict_files(readable=READABLE, writable=writable)
    # last: it refuses the calls by which files were restricted
    permit_computing_only()


def _passes(code: str, tests: list[str]) -> bool:
    names = {"__name__": "__main__"}
    try:
        for text in (code, *tests):
            exec(compile(text, "<completion>", "exec"), names)  # noqa: S102 - this process is for nothing else
    # SystemExit as well: code that ends before its tests has not passed them
    except BaseException:
        return False
    return True


def _print(code: str) -> None:
    """Run code whose output is asked for, and print the error that ends it, if any, in one line."""
    problem = ""
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102 - this process is for nothing else
    except SystemExit:
        pass
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}\n"
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # the code may have closed it, or put something else in its place
            stream.flush()  # type: ignore[union-attr]
    os.write(1, problem.encode(errors="replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
