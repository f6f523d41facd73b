"""The sandbox of a decoder process, entered before it reads a video: no network, no new programs, no writing of files,
no reading of other files, and bounded memory.

Codecs are large and old, and read untrusted bytes. A video that takes over a codec is confined to a process that can
only decode; it cannot reach the server. It can reach other videos: a decoder process has the memory of all frames of
its service, and could read and change what others decode there.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import site
import sys
import sysconfig
from enum import Enum

from vllm_omni_sched.video.sandbox import landlock, seccomp
from vllm_omni_sched.video.sandbox.seccomp import Profile

__all__ = ["Part", "Profile", "die_with_parent", "enter", "missing"]

_PR_SET_PDEATHSIG = 1
_FILES = 64
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/sys/devices/system/cpu", "/proc/self", "/proc/cpuinfo")
_PACKAGES = (__name__.partition(".")[0], "av", "numpy", "msgspec")  # readable wherever they were loaded from


class Part(str, Enum):
    """Part of the sandbox that a system may lack."""

    SECCOMP = "seccomp"  # no network, no new programs
    LANDLOCK = "landlock"  # no reading of other files


def missing() -> tuple[Part, ...]:
    """Return the parts of the sandbox that this system lacks; checks only, and changes nothing."""
    found = []
    if not (seccomp.supported() and os.path.exists("/proc/sys/kernel/seccomp")):
        found.append(Part.SECCOMP)
    if not landlock.version():
        found.append(Part.LANDLOCK)
    return tuple(found)


def die_with_parent(parent: int) -> None:
    """End this process when the thread that started it ends; at once if its process ``parent`` has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def enter(profile: Profile, *, memory_bytes: int, file_bytes: int) -> tuple[Part, ...]:
    """Enter the sandbox, irrevocably. Call it before other threads are started.

    Args:
        memory_bytes: bound on private memory; the owner bounds the shared memory of videos and frames.
        file_bytes: largest memory file that the process may write.

    Returns:
        The parts that this system lacks, and without which the process goes on.

    Raises:
        OSError: a restriction that every system supports was refused.
    """
    without = []
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        *(((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_NOFILE, _FILES)) if profile is Profile.CPU else ()),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    _prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1)
    if profile is Profile.CPU:
        try:
            landlock.restrict((*_READABLE, *_code()))
        except OSError:
            without.append(Part.LANDLOCK)
    try:
        if not seccomp.supported():
            raise OSError("no seccomp filter is known for this machine")
        seccomp.install(profile)
    except OSError:
        without.append(Part.SECCOMP)
    return tuple(without)


def _code() -> set[str]:
    """Return the folders of the interpreter's library, of installed packages, and of our own package."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)}
    found |= {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}
    for name in _PACKAGES:
        found.update(getattr(sys.modules.get(name), "__path__", ()))
    return {path for path in found if path}


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
