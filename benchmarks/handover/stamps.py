"""When each message was put and got: written by the stages' processes, read by the one that asks them.

A stamp is a record in a mapped file, and takes a microsecond: no system call, nothing to flush.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STAMP = np.dtype([("kind", "u1"), ("edge", "S16"), ("key", "S96"), ("begin", "f8"), ("end", "f8")])
CAPACITY = 1 << 17
WRITE_EVERY = 16
"""Looks in vain, which are many."""
PUT, GET, ASKED, LOOKS, YIELD = 1, 2, 3, 4, 5


class Stamps:
    """Of one connector in one process; any of its threads writes.

    Args:
        folder: of all files of a run.
    """

    def __init__(self, folder: Path) -> None:
        shape = (CAPACITY,)
        self._stamps = np.memmap(folder / f"{secrets.token_hex(8)}.stamps", STAMP, "w+", shape=shape)
        self._next = itertools.count(1)
        self._looks, self._seconds = 0, 0.0
        self._asked: set[str] = set()

    def write(self, kind: int, edge: str, key: str, begin: float, end: float) -> None:
        """Write a stamp, in seconds of the monotonic clock."""
        self._stamps[next(self._next)] = (kind, edge.encode(), key.encode(), begin, end)

    def looked(self, edge: str, key: str, begin: float, end: float) -> None:
        """Note a look that found no message; the first one for a key tells since when it is wanted."""
        if key not in self._asked:
            self._asked.add(key)
            self.write(ASKED, edge, key, begin, end)
        self._looks += 1
        self._seconds += end - begin
        if self._looks % WRITE_EVERY == 0:
            self._stamps[0] = (LOOKS, b"", b"", self._looks, self._seconds)


class HandOver(NamedTuple):
    """Times of one message, in seconds of the monotonic clock."""

    edge: str
    key: str
    put_begin: float
    put_end: float
    get_begin: float
    get_end: float
    asked: float  # when its receiver first looked for it
    floor: float | None  # seconds of a call that does nothing but let other threads and processes run; not of all


def read(folder: Path) -> tuple[list[HandOver], int, float]:
    """Return the messages that were put and got, the number of looks that found none, and their seconds."""
    stamps = [stamp for file in sorted(folder.glob("*.stamps")) for stamp in _of(file)]
    put = {(s["edge"], s["key"]): s for s in stamps if s["kind"] == PUT}
    floor = {s["key"]: float(s["end"] - s["begin"]) for s in stamps if s["kind"] == YIELD}
    asked = {(s["edge"], s["key"]): float(s["begin"]) for s in stamps if s["kind"] == ASKED}
    found = []
    for got in stamps:
        sent = put.get((got["edge"], got["key"]))
        if got["kind"] == GET and sent is not None:
            times = (float(sent["begin"]), float(sent["end"]), float(got["begin"]), float(got["end"]))
            asked_at = asked.get((got["edge"], got["key"]), float(got["begin"]))
            found.append(HandOver(got["edge"].decode(), got["key"].decode(), *times, asked_at, floor.get(got["key"])))
    looks = [s for s in stamps if s["kind"] == LOOKS]
    return found, sum(int(s["begin"]) for s in looks), sum(float(s["end"]) for s in looks)


def _of(file: Path) -> Iterator[Any]:
    stamps = np.memmap(file, STAMP, "r")
    yield from stamps[stamps["kind"] != 0].copy()
