"""Which system calls this process may still make: those of a program that computes, and reads and writes files.

None that opens a connection, starts a process or a thread, makes a folder, or touches another process or the rights of
a file. By seccomp (https://man7.org/linux/man-pages/man2/seccomp.2.html), through libseccomp, which knows the calls of
each architecture.
Standard library only: the programs that run code of others import it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable

PERMITTED = """
    access alarm brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range dup dup2 dup3
    epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 exit exit_group faccessat faccessat2 fadvise64 fallocate
    fchdir fcntl fdatasync flock fstat fstatfs fsync ftruncate futex getcwd getdents64 getegid geteuid getgid getgroups
    getitimer getpgid getpgrp getpid getppid getrandom getresgid getresuid getrlimit getrusage getsid gettid
    gettimeofday getuid lseek lstat madvise membarrier mmap mprotect mremap msync munmap nanosleep
    newfstatat pause pipe pipe2 poll ppoll pread64 preadv pselect6 pwrite64 pwritev read readlink readlinkat readv
    rename renameat renameat2 restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn
    rt_sigsuspend rt_sigtimedwait sched_getaffinity sched_yield select sendfile set_robust_list setitimer sigaltstack
    stat statfs statx symlink symlinkat sysinfo time times umask uname unlink unlinkat write writev
"""
WRITE_ONLY, READ_AND_WRITE, ACCESS_MODE = os.O_WRONLY, os.O_RDWR, os.O_ACCMODE
READ_WITHOUT_TRUNCATION = ACCESS_MODE | os.O_TRUNC
"""Landlock before Linux 6.2 would let a file that may be read be emptied."""

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
        permit(name, [Comparison(flags, MASKED_EQUAL, ACCESS_MODE, WRITE_ONLY)])
        permit(name, [Comparison(flags, MASKED_EQUAL, ACCESS_MODE, READ_AND_WRITE)])
    permit("prlimit64", [Comparison(0, EQUAL, 0), Comparison(2, EQUAL, 0)])  # reading its own limits
    permit("tgkill", [Comparison(0, EQUAL, os.getpid())])  # abort(): a signal to itself
    _checked(library.seccomp_load(calls))
    library.seccomp_release(calls)


def _checked(answer: int) -> None:
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
