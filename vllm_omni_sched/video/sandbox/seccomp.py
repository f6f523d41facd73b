"""A kernel filter of the system calls that a decoder process may make (seccomp, classic BPF).

It lists refused calls, not allowed ones: the calls of codecs, drivers and the C library differ by version, and only few
calls can do damage.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from enum import Enum

PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_SPEED = 4  # SPEC_ALLOW: before Linux 5.16 a filter slows down the whole process, as a mitigation of speculative leaks
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQ, _GE, _AND_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_ARCHS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name: numbers on x86_64 and aarch64; -1 if there is none
_REFUSED = {
    # the network, and sockets of other processes
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmmsg": (307, 269),
    # new programs and processes, and access to other processes
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, -1),
    "vfork": (58, -1),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # priority of processors and disks
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # System V and POSIX memory, queues and semaphores, which outlive the process
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # the file system; for opening see below
    "creat": (85, -1),
    "truncate": (76, 45),
    "unlink": (87, -1),
    "unlinkat": (263, 35),
    "rename": (82, -1),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, -1),
    "mkdirat": (258, 34),
    "rmdir": (84, -1),
    "link": (86, -1),
    "linkat": (265, 37),
    "symlink": (88, -1),
    "symlinkat": (266, 36),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    # the machine
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "setrlimit": (160, 164),
}
# the C library can do without them, and their flags are in memory that a filter cannot read
_ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}
_OPENS = {"open": (2, -1, 1), "openat": (257, 56, 2)}  # and the position of the flags among the arguments
# commands that let a file signal any process of this user: fcntl's F_SETOWN, F_SETSIG, F_SETOWN_EX, and ioctl's
# FIOSETOWN, SIOCSPGRP; and ioctl's TIOCSTI, TIOCLINUX, which type into a terminal
_COMMANDS = {"fcntl": (72, 25, (8, 10, 15)), "ioctl": (16, 29, (0x8901, 0x8902, 0x5412, 0x541C))}
_CLONE, _TGKILL, _PRLIMIT = (56, 220), (234, 131), (302, 261)


class Profile(str, Enum):
    """Set of system calls that a process needs."""

    CPU = "cpu"  # memory, and reading files
    DEVICE = "device"  # a GPU's driver: it writes to device files, and talks to its daemons


_DEVICE_NEEDS = {
    *("socketpair", "connect", "bind", "process_vm_readv", "mknod", "mknodat", "mkdir", "mkdirat", "chmod"),
    "sched_setaffinity",  # of the driver's threads
}


def supported() -> bool:
    """Return whether a filter is known for this machine."""
    return platform.machine() in _ARCHS and struct.calcsize("P") == 8


def program(profile: Profile, machine: str, pid: int) -> list[tuple[int, int, int, int]]:
    """Return the filter as instructions: code, jump if true, jump if false, operand.

    Refused calls fail with EPERM, or with ENOSYS if the C library can do without them. A call by another ABI, which
    numbers calls differently, ends the process.

    Args:
        machine: result of `platform.machine`.
        pid: the process, which may signal its own threads.
    """
    arch, column = _ARCHS[machine]
    number, argument = 0, 16  # offsets in the kernel's data
    code = [
        (_LOAD, 0, 0, 4),
        (_EQ, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, number),
    ]
    if machine == "x86_64":
        code += [(_GE, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]

    def refuse(numbers: tuple[int, ...], error: int) -> None:
        if numbers[column] >= 0:
            code.extend([(_EQ, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | error)])

    for name, numbers in _REFUSED.items():
        if profile is Profile.CPU or name not in _DEVICE_NEEDS | {"socket"}:
            refuse(numbers, errno.EPERM)
    for numbers in _ABSENT.values():
        refuse(numbers, errno.ENOSYS)

    def judge(number_of: int, place: int, *test: tuple[int, int, int, int]) -> None:
        """Test an argument of a call: ``test`` falls through to a refusal, or jumps over it."""
        if number_of >= 0:
            body = [(_LOAD, 0, 0, argument + 8 * place), *test, (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
            code.append((_EQ, 0, len(body) + 1, number_of))
            code.extend([*body, (_RETURN, 0, 0, _ALLOW)])

    for x86, arm, commands in _COMMANDS.values():
        *others, last = commands
        found = [(_EQ, len(others) - at, 0, one) for at, one in enumerate(others)]
        judge((x86, arm)[column], 1, *found, (_EQ, 0, 1, last))
    judge(_CLONE[column], 0, (_AND_SET, 1, 0, _CLONE_THREAD))
    judge(_TGKILL[column], 0, (_EQ, 1, 0, pid))
    # reading limits is allowed; they are set if the pointer, in two words, is not null
    judge(_PRLIMIT[column], 2, (_EQ, 0, 2, 0), (_LOAD, 0, 0, argument + 8 * 2 + 4), (_EQ, 1, 0, 0))
    if profile is Profile.CPU:
        for x86, arm, place in _OPENS.values():
            judge((x86, arm)[column], place, (_AND_SET, 0, 1, _WRITES))
    else:
        judge(_REFUSED["socket"][column], 0, (_EQ, 1, 0, 1))  # AF_UNIX
    return [*code, (_RETURN, 0, 0, _ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(profile: Profile) -> None:
    """Install the filter for all threads of this process, irrevocably. Needs no privilege after PR_SET_NO_NEW_PRIVS.

    Raises:
        OSError: the kernel does not support such filters.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    machine = platform.machine()
    body = b"".join(struct.pack("=HBBI", *one) for one in program(profile, machine, os.getpid()))
    call = {"x86_64": 317, "aarch64": 277}[machine]  # seccomp(2)
    filled = _Program(len(body) // 8, body)
    for flags in (_ALL_THREADS | _SPEED, _ALL_THREADS):  # older kernels refuse the flag
        if not libc.syscall(call, _SET_MODE_FILTER, flags, ctypes.byref(filled)):
            return
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number) if number else "the filter could not be installed for a thread")
