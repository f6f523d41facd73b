"""The copy of a video that decoders read; pages that no piece needs any more are returned to the system.

Otherwise a video of some minutes would stay in memory whole beside its few wanted frames.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.video.facts import PacketFlag, Piece, VideoIndex

_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)

Counts = npt.NDArray[np.int32]


def free_memory(fd: int, start: int, nbytes: int) -> None:
    """Free the memory of a part of a memory file, which then reads as zeros; without system support it is kept."""
    _libc.fallocate(fd, _PUNCH, ctypes.c_long(start), ctypes.c_long(nbytes))


class PageUse:
    """Tracks which pages of the packets are still needed. Pure.

    Args:
        index: index of the video.
        nbytes: size of the packets' bytes.
        pieces: pieces that will be decoded.
        keeps_start: whether the first start is needed to the end.
    """

    def __init__(self, index: VideoIndex, nbytes: int, pieces: Sequence[Piece], keeps_start: bool = False) -> None:
        self._packets = index.packets
        self._pages = -(-nbytes // mmap.PAGESIZE)
        self._needs: Counts = np.zeros(self._pages, np.int32)
        for piece in pieces:
            self._needs += self._pages_of(piece.feed)
        if keeps_start:
            self._needs += self._pages_of(np.flatnonzero(index.packets["flags"] & PacketFlag.START)[:1])

    def unneeded(self) -> list[tuple[int, int]]:
        """Return the runs of pages that no piece needs: offset and size in bytes."""
        return _runs(self._needs == 0)

    def release(self, piece: Piece) -> list[tuple[int, int]]:
        """Record that a piece is decoded; return the runs that no piece needs any more."""
        pages = self._pages_of(piece.feed)
        self._needs -= pages
        return _runs((pages > 0) & (self._needs == 0))

    def _pages_of(self, numbers: npt.NDArray[np.integer[Any]]) -> Counts:
        """Return, for each page, how many of these packets overlap it."""
        packets = self._packets[numbers]
        change = np.zeros(self._pages + 1, np.int32)
        there = packets["nbytes"] > 0
        first, last = packets["offset"][there], packets["offset"][there] + packets["nbytes"][there] - 1
        np.add.at(change, first // mmap.PAGESIZE, 1)
        np.add.at(change, last // mmap.PAGESIZE + 1, -1)
        return np.cumsum(change[:-1], dtype=np.int32)


class PacketMemory:
    """A memory file with a video, of which the loader has a copy.

    Args:
        fd: descriptor of the memory file.
        data: content of the file.
        index: index of the video whose packets are in it.
    """

    def __init__(self, fd: int, data: bytes | memoryview, index: VideoIndex) -> None:
        self._fd, self._data, self._index = fd, memoryview(data).cast("B"), index
        self._use: PageUse | None = None

    def prepare(self, pieces: Sequence[Piece], keeps_start: bool = False) -> int:
        """Prepare the pages for exactly these pieces; return the number of bytes written again.

        Args:
            keeps_start: whether decoders read the first start when they open the video, as those on devices do.
        """
        written = 0
        if self._use is not None:  # some pages may have been freed
            while written < self._data.nbytes:
                written += os.pwrite(self._fd, self._data[written:], written)
        self._use = PageUse(self._index, self._data.nbytes, pieces, keeps_start)
        for run in self._use.unneeded():
            free_memory(self._fd, *run)
        return written

    def release(self, piece: Piece) -> None:
        """Free the pages of a piece that will not be decoded again."""
        assert self._use is not None
        for run in self._use.release(piece):
            free_memory(self._fd, *run)


def _runs(pages: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], pages, [False])).astype(np.int8)))
    return [
        (int(start) * mmap.PAGESIZE, int(stop - start) * mmap.PAGESIZE)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
