"""Seccomp: a list of system calls that remain. All others fail with "not permitted": sockets, new processes and threads,
signals, ptrace, mounts, other programs, changes of files, of rights and of limits.

Kernel: Documentation/userspace-api/seccomp_filter.rst; a filter is a program for the packet filter's machine (BPF), built here
from (code, jump if true, jump if false, value).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from analysis.quality.confinement.inside import kernel

# What a Python that computes needs: (x86_64, aarch64); None: there is no such call.
ALLOWED: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "close": (3, 57), "lseek": (8, 62),
    "pread64": (17, 67), "fstat": (5, 80), "newfstatat": (262, 79), "stat": (4, None), "lstat": (6, None),
    "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "getdents64": (217, 61),
    "statfs": (137, 43), "fstatfs": (138, 44), "fadvise64": (221, 223), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "futex": (202, 98), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "getrandom": (318, 278), "uname": (63, 160), "sysinfo": (99, 179),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getcpu": (309, 168), "rseq": (334, 293),
    "set_robust_list": (273, 99), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
OPEN, OPENAT, FCNTL, IOCTL, LIMITS = (2, None), (257, 56), (72, 25), (16, 29), (302, 261)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 1030)  # duplicates, flags, locks; not those that send signals
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = (
    0,
    4,
    16,
)  # places in what the filter sees; an argument has 8 bytes, its low ones first
Line = tuple[int, int, int, int]


def restrict() -> None:
    """Filter this process's system calls from now on; needs no_new_privs. Raises OSError where that is not possible."""
    lines = program(kernel.architecture())
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    kept = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(kept)))
    kernel.prctl(kernel.SECCOMP, 2, ctypes.byref(header))


def program(architecture: str) -> list[Line]:
    """The filter for a processor. Calls of another architecture (32 bits on 64) end the process."""
    column = list(kernel.ARCHITECTURES).index(architecture)
    number = kernel.ARCHITECTURES[architecture]
    lines: list[Line] = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, number), _return(KILL), (LOAD, 0, 0, NUMBER)]
    for numbers in ALLOWED.values():
        lines += _when(numbers[column], [_return(ALLOW)])
    for opening, flags in ((OPEN, 1), (OPENAT, 2)):
        reading = [(LOAD, 0, 0, _low(flags)), (ANY_BIT, 0, 1, WRITING), _fail(errno.EACCES), _return(ALLOW)]
        lines += _when(opening[column], reading)
    commands = [line for command in FCNTL_COMMANDS for line in ((EQUAL, 0, 1, command), _return(ALLOW))]
    lines += _when(FCNTL[column], [(LOAD, 0, 0, _low(1)), *commands, _fail(errno.EPERM)])
    lines += _when(LIMITS[column], _asking_for_own_limits())
    lines += _when(IOCTL[column], [_fail(errno.ENOTTY)])  # what Python asks of files: are you a terminal
    return [*lines, _fail(errno.EPERM)]


def _asking_for_own_limits() -> list[Line]:
    """prlimit64(0, limit, NULL, ...): process number 0 and no new value."""
    zero = [(LOAD, 0, 0, place) for place in (_low(0), _low(2), _low(2) + 4)]
    lines: list[Line] = []
    for load in zero:
        lines += [load, (EQUAL, 1, 0, 0), _fail(errno.EPERM)]
    return [*lines, _return(ALLOW)]


def _when(number: int | None, lines: list[Line]) -> list[Line]:
    """Lines, all ending in a return, that are jumped over unless the system call is this one."""
    return [] if number is None else [(EQUAL, 0, len(lines), number), *lines]


def _low(argument: int) -> int:
    return ARGUMENTS + 8 * argument


def _return(value: int) -> Line:
    return (RETURN, 0, 0, value)


def _fail(number: int) -> Line:
    return _return(FAIL | number)
