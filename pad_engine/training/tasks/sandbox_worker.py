"""The process of sandbox.py: confines itself, runs a program, and at its end hands back a token.

Started as a script with nothing but the standard library: path of the program, seconds, bytes of memory. The filter of
system calls is classic BPF (man 2 seccomp); it stays for good, and no privilege is needed for it.
"""

import ctypes
import fcntl
import math
import os
import platform
import random
import resource
import signal
import struct
import sys
from types import ModuleType

TOKEN = 16  # bytes
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# numbers on x86-64 and arm64; arm64 never had the oldest
DENIED = {
    # processes and threads
    "clone": (56, 220), "fork": (57,), "vfork": (58,), "execve": (59, 221), "execveat": (322, 281),
    # other processes
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
    # network; io_uring would do what the filter does not see
    "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425),
    # changes of files
    "creat": (85,), "truncate": (76, 45), "ftruncate": (77, 46), "rename": (82,), "renameat": (264, 38),
    "renameat2": (316, 276), "mkdir": (83,), "mkdirat": (258, 34), "rmdir": (84,), "unlink": (87,),
    "unlinkat": (263, 35), "link": (86,), "linkat": (265, 37), "symlink": (88,), "symlinkat": (266, 36),
    "mknod": (133,), "mknodat": (259, 33), "chmod": (90,), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92,),
    "fchown": (93, 55), "lchown": (94,), "fchownat": (260, 54), "utime": (132,), "utimes": (235,), "futimesat": (261,),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
# these only for reading: the argument that holds the flags
OPENING = {"open": ((2,), 1), "openat": ((257, 56), 2)}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# clone3, openat2 and whatever is newer, alike everywhere
FIRST_NEW = 435

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16  # in what a filter reads
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2


def instruction(code: int, value: int, when: int = 0, otherwise: int = 0) -> bytes:
    """One of a filter; when, otherwise: how many of the next to skip."""
    return struct.pack("HBBI", code, when, otherwise, value)


def system_call_filter(machine: str) -> bytes:
    """The filter for a kind of machine."""
    column = list(AUDIT_ARCH).index(machine)
    lines = [
        instruction(LOAD, ARCH_AT),
        instruction(EQUAL, AUDIT_ARCH[machine], when=1),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER_AT),
        instruction(AT_LEAST, FIRST_NEW, otherwise=1),
        instruction(RETURN, ERRNO | ENOSYS),
    ]
    for numbers in DENIED.values():
        for number in numbers[column : column + 1]:
            lines += [instruction(EQUAL, number, otherwise=1), instruction(RETURN, ERRNO | EPERM)]
    for numbers, argument in OPENING.values():
        for number in numbers[column : column + 1]:
            lines += [
                instruction(EQUAL, number, otherwise=4),
                instruction(LOAD, ARGUMENTS_AT + 8 * argument),
                instruction(ANY_BIT, WRITING, otherwise=1),
                instruction(RETURN, ERRNO | EPERM),
                instruction(RETURN, ALLOW),
            ]
    return b"".join([*lines, instruction(RETURN, ALLOW)])


def confine(seconds: float, memory: int) -> None:
    """Give up, for good, all that a program does not need to compute. OSError where that is not possible."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in AUDIT_ARCH:
        raise OSError(f"{sys.platform} on {machine} is not supported")
    limits = {
        resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: math.ceil(seconds) + 1, resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: 0,
    }  # fmt: skip
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    code = system_call_filter(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8, ctypes.addressof(buffer)))
    # if the parent dies, nobody else ends a program that waits
    for option, value in ((PR_SET_PDEATHSIG, int(signal.SIGKILL)), (PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), f"no filter of system calls: {os.strerror(ctypes.get_errno())}")


def hide(descriptor: int) -> int:
    """Move one of the standard streams to a descriptor that a program does not hit by chance."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, random.randrange(32, 192))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)
    return moved


def main() -> None:
    """Confine, say "ready", run, and hand the token back if the program came to its end."""
    path, seconds, memory = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    # kept here: the program may change what the modules hold
    read, write, leave = os.read, os.write, os._exit
    tokens, answers = hide(0), hide(1)
    with open(path, encoding="utf-8") as file:
        source = file.read()
    module = ModuleType("program")
    sys.modules["program"], sys.argv = module, [path]
    try:
        confine(seconds, memory)
    except OSError as error:
        write(answers, str(error).encode() + b"\n")
        leave(2)
    write(answers, b"ready\n")
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException:
        leave(1)
    # it was in its pipe until now, where the program had no reason to look for it
    write(answers, read(tokens, TOKEN))
    leave(0)


if __name__ == "__main__":
    main()
