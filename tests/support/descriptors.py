"""How many files this process has open, to tell whether something leaks them."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def descriptors() -> int:
    """Open ones; without sockets of a network, which libraries that other tests have loaded open as they like."""
    gc.collect()  # what other tests have left
    local = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    opened = map(_opened, os.listdir("/proc/self/fd"))
    return sum(not name.startswith("socket:") or name in local for name in opened)


def _opened(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return "socket: that of the listing itself, or one that has just gone"
