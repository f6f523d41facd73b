"""Another process's outbox, as a receiver sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from vllm_omni_sched.connectors.arena import layout as at
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.index import Index
from vllm_omni_sched.connectors.arena.layout import RING, Layout, Record
from vllm_omni_sched.connectors.arena.memory import Memory, open_private
from vllm_omni_sched.errors import CorruptMessageError


@dataclass
class Peer:
    """The mapped outbox of another process."""

    path: Path
    memory: Memory
    layout: Layout
    index: Index
    pools: dict[int, Memory] = field(default_factory=dict)

    def region(self, record: Record) -> memoryview:
        """Return the memory of a message.

        Raises:
            CorruptMessageError: its record points outside the outbox.
        """
        if record.pool == RING:
            raise CorruptMessageError("a message has moved while it was looked at")
        memory, start = self._pool(record.pool), record.offset
        there = min(len(memory.view), os.fstat(memory.fd).st_size)
        end = start + record.nbytes
        if not record.nbytes or end > there:
            raise CorruptMessageError("a message is said to lie outside its outbox")
        return memory.view[start : start + record.nbytes]

    def _pool(self, number: int) -> Memory:
        if number not in self.pools:
            fd = open_private(self.path.parent / f"{self.path.stem}.{number}{meeting.POOL}")
            if fd is None:
                raise CorruptMessageError("a message is said to lie in a pool that is not there")
            nbytes = os.fstat(fd).st_size
            if not nbytes or not meeting.is_private(fd):
                os.close(fd)
                raise CorruptMessageError("a message is said to lie in a pool that is none")
            self.pools[number] = mapped(fd, nbytes)
        return self.pools[number]

    def close(self) -> None:
        """Unmap the memory that no view uses."""
        for memory in (*self.pools.values(), self.memory):
            memory.close()


def mapped(fd: int, nbytes: int) -> Memory:
    """Map another process's file; close its descriptor if that fails."""
    try:
        return Memory(fd, nbytes, nbytes)
    except BaseException:
        os.close(fd)
        raise


def layout_of(fd: int, nbytes: int) -> Layout | None:
    """Return the layout of another process's outbox; None if it is not an outbox of this version."""
    if not meeting.is_private(fd) or nbytes < at.PAGE:
        return None
    magic, version, slots, ring, ring_bytes, _ = at.HEAD.unpack(os.pread(fd, at.HEAD.size, 0))
    if (magic, version) != (at.MAGIC, at.VERSION) or not 0 < slots <= 1 << 20:
        return None
    layout = Layout.of(slots, ring_bytes)
    return layout if (layout.slots, layout.ring, layout.nbytes) == (slots, ring, nbytes) else None
