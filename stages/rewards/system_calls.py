"""Which system calls this process may still make: those of a program that computes, and reads and writes files.

None that opens a connection, starts a process or a thread, makes a folder, or touches another process or the rights of
a file; none by which a file grows without being written (`fallocate`, shared mappings). By seccomp
(https://man7.org/linux/man-pages/man2/seccomp.2.html), through libseccomp, which knows the calls of each architecture.
Standard library only: the programs that run code of others import it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable

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
FCNTL_COMMANDS = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL),
    *(fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW),
)
"""And F_SETFL without O_ASYNC. Others (F_SETOWN, F_SETSIG, F_NOTIFY, F_SETLEASE) have the kernel send signals, SIGKILL
as well, to any process of the user.
"""
IOCTL_COMMANDS = (0x5450, 0x5451, 0x5421)
"""FIONCLEX, FIOCLEX, FIONBIO: Python sets flags of its descriptors by them. FIOSETOWN and FIOASYNC are as F_SETOWN."""
NAMELESS = os.O_TMPFILE & ~os.O_DIRECTORY
WRITING = os.O_ACCMODE | NAMELESS
"""A file without a name is in no folder where its size is seen."""
READ_WITHOUT_TRUNCATION = WRITING | os.O_TRUNC
"""Landlock before Linux 6.2 would let a file that may be read be emptied."""
SHARING = mmap.MAP_SHARED | mmap.MAP_PRIVATE

ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
EQUAL, MASKED_EQUAL = 4, 7


class Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`: argument `arg` of a call & `first` == `second` for MASKED_EQUAL, == `first` for EQUAL."""

    _fields_ = [
        ("arg", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


def permit_computing_only() -> None:
    """From now on, every other call fails with EPERM. Raises OSError where there is no seccomp or no libseccomp."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    calls = ctypes.c_void_p(library.seccomp_init(REFUSE))
    if not calls:
        raise OSError(errno.ENOSYS, "seccomp_init failed")

    def permit(name: str, where: Iterable[Comparison] = ()) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # an architecture without this call
            return
        given = tuple(where)
        _checked(library.seccomp_rule_add_array(calls, ALLOW, number, len(given), (Comparison * len(given))(*given)))

    for name in PERMITTED.split():
        permit(name)
    for name, flags in (("open", 1), ("openat", 2)):
        permit(name, [Comparison(flags, MASKED_EQUAL, READ_WITHOUT_TRUNCATION, os.O_RDONLY)])
        permit(name, [Comparison(flags, MASKED_EQUAL, WRITING, os.O_WRONLY)])
        permit(name, [Comparison(flags, MASKED_EQUAL, WRITING, os.O_RDWR)])
    for command in FCNTL_COMMANDS:
        permit("fcntl", [Comparison(1, EQUAL, command)])
    permit("fcntl", [Comparison(1, EQUAL, fcntl.F_SETFL), Comparison(2, MASKED_EQUAL, os.O_ASYNC, 0)])
    for command in IOCTL_COMMANDS:
        permit("ioctl", [Comparison(1, EQUAL, command)])
    permit("mmap", [Comparison(3, MASKED_EQUAL, SHARING, mmap.MAP_PRIVATE)])
    permit("mmap", [Comparison(3, MASKED_EQUAL, mmap.MAP_ANONYMOUS, mmap.MAP_ANONYMOUS)])
    permit("prlimit64", [Comparison(0, EQUAL, 0), Comparison(2, EQUAL, 0)])  # reading its own limits
    permit("tgkill", [Comparison(0, EQUAL, os.getpid())])  # abort(): a signal to itself
    _checked(library.seccomp_load(calls))
    library.seccomp_release(calls)


def _checked(answer: int) -> None:
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
