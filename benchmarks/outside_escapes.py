"""Programs that try to reach something outside of the sandbox: files, processes, the network, the kernel.

As in `escapes`, tests pass only if the attempt works: a secret that is read, a socket that connects. `escaping.Arena`
fills in the names: {secret} is a file with {content}, and {folder} is where a file may be written. Sockets listen at
{port} and {abstract}. {pid} is that of the process that wants the verdict, {here} a file of this project.
"""

from __future__ import annotations

from benchmarks.escapes import Escape

READS = "assert candidate({secret!r}) == {content!r}"
WORKS = "assert candidate() is True"


def reading(name: str, body: str, reason: str = r"\w*Error") -> Escape:
    """An attempt to read the secret: the body of a function of its path."""
    code = "import ctypes, glob, io, mmap, os, sys\ndef candidate(path):\n" + _indented(body)
    return Escape(name, "own root folder, landlock", code, READS, reason)


def doing(name: str, stopped: str, body: str, reason: str = r"\w*Error") -> Escape:
    """An attempt to do something: the body of a function that ends by returning True."""
    code = "import ctypes, os, signal, socket, subprocess, sys\ndef candidate():\n" + _indented(body + "\nreturn True")
    return Escape(name, stopped, code, WORKS, reason)


def _indented(body: str) -> str:
    return "".join(f"    {line}\n" for line in body.split("\n"))


SYSCALL = "libc = ctypes.CDLL(None, use_errno=True)\n"
SECCOMP = "seccomp"
OUTSIDE = (
    reading("open the secret", "return open(path).read()"),
    reading("os.open, mmap", "f = os.open(path, os.O_RDONLY)\nreturn mmap.mmap(f, 0, prot=mmap.PROT_READ)[:].decode()"),
    reading("open it by a path with ..", "return open(os.path.dirname(os.__file__) + '/../' * 20 + path).read()"),
    reading(
        "openat2, past the C library",
        "libc = ctypes.CDLL(None, use_errno=True)\nhow = (ctypes.c_uint64 * 3)(0, 0, 0)\n"
        "f = libc.syscall(437, -100, path.encode(), how, 24)\nreturn os.read(f, 999).decode()",
    ),
    reading("a symbolic link to it", "os.symlink(path, '/tmp/link')\nreturn open('/tmp/link').read()"),
    reading("the parent's root", "return open(f'/proc/{os.getppid() or 1}/root' + path).read()"),
    reading(
        "the parent's descriptors",
        "return ''.join(open(name).read() for name in glob.glob('/proc/[0-9]*/fd/*')) or open('/proc/1/environ').read()",
    ),
    reading("inherited descriptors", "os.lseek(0, 0, 0)\nreturn ''.join(os.read(f, 999).decode() for f in range(64))"),
    reading(
        "file handles",
        "libc = ctypes.CDLL(None, use_errno=True)\nb = ctypes.create_string_buffer(b'\\x08' + bytes(200))\n"
        "libc.name_to_handle_at(-100, path.encode(), b, ctypes.byref(ctypes.c_int()), 0)\n"
        "return os.read(libc.open_by_handle_at(-100, b, 0), 999).decode()",
    ),
    Escape(
        "/etc/passwd",
        "own root folder, landlock",
        "def candidate(): return 'root' in open('/etc/passwd').read()",
        WORKS,
        r"\w*Error",
    ),
    Escape(
        "the tests' source",
        "own root folder, landlock",
        "def candidate(): return bool(open({here!r}).read())",
        WORKS,
        r"\w*Error",
    ),
    Escape(
        "the environment",
        "started with an empty one",
        "import os\ndef candidate(): return any({content!r} in text for text in os.environ.values())",
        WORKS,
        "AssertionError",
    ),
    Escape(
        "installed packages",
        "hidden in its root folder, landlock",
        "import sys\nsys.path += [p + '/site-packages' for p in sys.path if p[-4:] in ('3.11', '3.12', '3.13')]\n"
        "import pip\ndef candidate(): return True",
        WORKS,
        "ModuleNotFoundError|PermissionError",
    ),
    doing(
        "/proc/PPID/mem",
        "own root folder, landlock, seccomp",
        "open(f'/proc/{os.getppid() or 1}/mem', 'r+b').write(b'x')",
    ),
    doing("ptrace", SECCOMP, SYSCALL + "assert libc.ptrace(16, {pid}, 0, 0) == 0", "AssertionError"),
    doing(
        "process_vm_writev",
        SECCOMP,
        SYSCALL + "b = ctypes.create_string_buffer(16)\nassert libc.process_vm_writev({pid}, b, 1, b, 1, 0) >= 0",
        "AssertionError",
    ),
    doing("kill the parent", SECCOMP, "os.kill({pid}, signal.SIGTERM)"),
    doing("kill everybody", SECCOMP, "os.kill(-1, signal.SIGKILL)"),
    doing("kill the group", SECCOMP, "os.killpg(0, signal.SIGKILL)"),
    doing("pidfd_send_signal", SECCOMP, "signal.pidfd_send_signal(os.pidfd_open({pid}), signal.SIGTERM)"),
    doing(
        "signals by a pipe's owner",
        SECCOMP,
        "import fcntl\nfcntl.fcntl(3, 8, {pid})\nfcntl.fcntl(3, 10, signal.SIGKILL)",
    ),
    doing("TCP to this machine", SECCOMP + ", own network", "socket.create_connection(('127.0.0.1', {port}), 2)"),
    doing(
        "UDP",
        SECCOMP + ", own network",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    ),
    doing(
        "a unix socket", SECCOMP + ", own root folder", "socket.socket(socket.AF_UNIX).connect({folder!r} + '/socket')"
    ),
    doing(
        "an abstract unix socket",
        SECCOMP + ", own network, landlock",
        "socket.socket(socket.AF_UNIX).connect(chr(0) + {abstract!r})",
    ),
    doing("socketpair", SECCOMP, "socket.socketpair()"),
    doing(
        "look up a name",
        SECCOMP + ", own network",
        "socket.getaddrinfo('localhost', 80)[0]\nsocket.socket()",
        r"\w*[eE]rror",
    ),
    doing("write a file", SECCOMP + ", own root folder, landlock", "open({folder!r} + '/written', 'w').write('x')"),
    doing(
        "write into /tmp", SECCOMP + ", own root folder, landlock", "open('/tmp/written-by-a-program', 'w').write('x')"
    ),
    doing(
        "change the standard library",
        SECCOMP + ", read-only root folder, landlock",
        "open(os.__file__, 'a').write('x')",
    ),
    doing("remove the secret", SECCOMP, "os.remove({secret!r})"),
    doing("rename it", SECCOMP, "os.rename({secret!r}, {secret!r} + '.old')"),
    doing("chmod", SECCOMP, "os.chmod({secret!r}, 0o777)"),
    doing("truncate", SECCOMP, "os.truncate({secret!r}, 0)"),
    doing("make a folder", SECCOMP, "os.mkdir({folder!r} + '/made')"),
    doing("run a shell", SECCOMP, "subprocess.run(['/bin/sh', '-c', 'true'], check=True)"),
    doing("become a shell", SECCOMP, "os.execv('/bin/sh', ['sh', '-c', 'true'])"),
    doing("multiprocessing", SECCOMP, "import multiprocessing\nmultiprocessing.Process(target=print).start()"),
    doing(
        "higher limits",
        SECCOMP + ", hard limits",
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (9, 9))",
        r"\w*Error",
    ),
    doing("mount", SECCOMP, SYSCALL + "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0", "AssertionError"),
    doing("other namespaces", SECCOMP, SYSCALL + "assert libc.unshare(0x10000000) == 0", "AssertionError"),
    doing("root again", SECCOMP, "os.setuid(0)"),
    doing("chroot", SECCOMP, "os.chroot('/')"),
    doing(
        "keys of the kernel",
        SECCOMP,
        SYSCALL + "assert libc.syscall(248, b'user', b'k', b'v', 1, -3) > 0",
        "AssertionError",
    ),
    doing(
        "bpf",
        SECCOMP,
        SYSCALL + "assert libc.syscall(321, 0, ctypes.create_string_buffer(64), 64) >= 0",
        "AssertionError",
    ),
    doing("userfaultfd", SECCOMP, SYSCALL + "assert libc.syscall(323, 0) >= 0", "AssertionError"),
    doing(
        "another architecture's system calls",
        SECCOMP,
        SYSCALL + "assert libc.syscall(0x40000000 + 57) >= 0",
        "AssertionError",
    ),
    doing(
        "io_uring",
        SECCOMP,
        SYSCALL + "assert libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0",
        "AssertionError",
    ),
    doing(
        "shared memory", SECCOMP, "from multiprocessing import shared_memory\nshared_memory.SharedMemory('x', True, 9)"
    ),
    doing(
        "System V shared memory",
        SECCOMP + ", own IPC",
        SYSCALL + "made = libc.shmget(0, 4096, 0o1600)\nassert made >= 0\nlibc.shmctl(made, 0, None)",
        "AssertionError",
    ),
    doing("the clock", SECCOMP, "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)"),
    doing("other processors", SECCOMP, "os.sched_setaffinity(0, os.sched_getaffinity(0))"),
)
# Harmless ones that do work where nothing confines (but rights and limits): the attempts are real. As root or as anybody.
REAL = (
    "open the secret", "os.open, mmap", "open it by a path with ..", "/etc/passwd", "TCP to this machine",
    "UDP", "a unix socket", "an abstract unix socket", "socketpair", "write a file", "remove the secret", "rename it",
    "truncate", "make a folder", "other processors", "System V shared memory",
)  # fmt: skip
