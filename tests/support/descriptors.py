"""Count what this process has open, to find leaks."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_SECONDS = 5.0


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """Fails when there are more descriptors of some kind after what runs within.

    Threads of libraries that other tests have loaded open and close theirs as they like. So there is patience: a leak
    stays for ever.
    """
    before = opened()
    yield
    until = time.monotonic() + PATIENCE_SECONDS
    while left := opened() - before:
        assert time.monotonic() < until, f"left open: {dict(left)}"
        time.sleep(0.02)


def opened() -> Counter[str]:
    """Return the number of open descriptors by kind, after what other tests have left is collected."""
    gc.collect()
    return open_now()


def open_now() -> Counter[str]:
    """Return the number of open descriptors by kind, without network sockets, which only other libraries open here."""
    local = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    names = [name for name in _names() if not name.startswith("socket:") or name in local]
    return Counter(name.partition(":[")[0] for name in names)  # "socket:[4711]", but "/dev/null"


def _names() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # that of the listing itself, or one that has just gone
