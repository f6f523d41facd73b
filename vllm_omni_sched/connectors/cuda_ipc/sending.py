"""The sending side: blocks of device tensors in flight, and messages with handles in place of tensors."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcOptions, Load, ShareReason, plan
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import ALIGNMENT, ON_DEVICE, PACKED, Message
from vllm_omni_sched.logs import get_logger

if TYPE_CHECKING:
    import torch

    from vllm_omni_sched.connectors.cuda_ipc.cuda import CudaShare

logger = get_logger(__name__)


Entry = tuple[int, int, int]
"""Place of one tensor: the index of its buffer in the message, its offset in the block, and its size in bytes."""


@dataclass(frozen=True)
class Group:
    """Tensors of a message on one device, and their places in a block."""

    device: str
    entries: Sequence[Entry]
    nbytes: int


@dataclass(frozen=True)
class Block:
    """A group in flight: the shared memory, and its handle."""

    handle: bytes
    memory: torch.Tensor  # shape (nbytes,), uint8
    group: Group


@dataclass(frozen=True, eq=False)
class Parcel:
    """The blocks of a message in flight."""

    edge: Edge
    key: str
    name: bytes
    blocks: Sequence[Block]
    nbytes: int


def groups(message: Message, device_of: Callable[[torch.Tensor], str | None]) -> list[Group]:
    """Return the tensors of a message that are on devices, grouped by device."""
    found: dict[str, list[Entry]] = {}
    ends: dict[str, int] = {}
    for place, buffer in enumerate(message.buffers):
        device = None if isinstance(buffer, np.ndarray) else device_of(buffer)
        if device is None:
            continue
        at = -(-ends.get(device, 0) // ALIGNMENT) * ALIGNMENT
        nbytes = int(buffer.nbytes)
        found.setdefault(device, []).append((place, at, nbytes))
        ends[device] = at + nbytes
    return [Group(device, entries, ends[device]) for device, entries in found.items()]


def copy_to(memory: torch.Tensor, group: Group, message: Message) -> None:
    """Copy the tensors of a group into a block, on the device; they become contiguous."""
    for place, at, nbytes in group.entries:
        tensor = message.buffers[place].detach()
        memory[at : at + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def with_handles(message: Message, blocks: Sequence[Block]) -> Message:
    """Return the message to send: handles and places instead of the tensors."""
    buffers: list[Any] = list(message.buffers)
    for block in blocks:
        for place, _, _ in block.group.entries:
            buffers[place] = np.empty(0, np.uint8)
    described = [(block.handle, block.group.entries) for block in blocks]
    body = msgspec.msgpack.encode((described, message.body))
    sent = Message(message.edge, message.key, body, buffers)
    sent.flags = message.flags | ON_DEVICE
    return sent


WARNED = {ShareReason.UNREACHABLE, ShareReason.ALLOCATOR, ShareReason.REFUSED}
"""Reasons that an operator may want to remove; each is logged once."""


@dataclass(frozen=True)
class Packed:
    """The message to send, as it was or with its parcel, and the number of device tensors by reason."""

    sent: Message
    parcel: Parcel | None
    reasons: Counter[ShareReason]


class BlockSender:
    """Owner of the blocks of device tensors in flight, which are freed when their messages are finished.

    Args:
        receivers: returns the devices that each receiver of an edge can open.
        make_room: checks messages in flight, and frees the blocks of finished ones.
    """

    def __init__(
        self,
        options: CudaIpcOptions,
        share: CudaShare,
        receivers: Callable[[Edge], Sequence[frozenset[str]]],
        make_room: Callable[[], object],
    ) -> None:
        self._options, self._share, self._receivers, self._make_room = options, share, receivers, make_room
        self._lock = threading.Lock()  # of the counts and the held blocks; never held during a call of the arena
        self._held: dict[int, Parcel] = {}
        self._held_bytes = 0
        self.sent_bytes = self.released = 0
        self.reasons: Counter[ShareReason] = Counter()  # numbers of tensors

    def pack(self, message: Message) -> Packed:
        """Make blocks of a message's device tensors, if `plan` decides so."""
        reasons: Counter[ShareReason] = Counter()
        blocks: list[Block] = []
        try:
            for group in groups(message, self._share.device_of) if not message.flags & PACKED else ():
                made = self._block(group, message)
                if isinstance(made, Block):
                    blocks.append(made)
                reasons[made if isinstance(made, ShareReason) else ShareReason.SHARED] += len(group.entries)
            if not blocks:
                return Packed(message, None, reasons)
            sent = with_handles(message, blocks)
        except BaseException:
            for block in blocks:
                self._let_go(block)
            raise
        nbytes = sum(block.group.nbytes for block in blocks)
        parcel = Parcel(message.edge, message.key, message.name, blocks, nbytes)
        sent.done = partial(self.release, parcel)
        with self._lock:
            self._held[id(parcel)] = parcel
        return Packed(sent, parcel, reasons)

    def count(self, packed: Packed) -> None:
        """Count a message that was sent."""
        with self._lock:
            for why in WARNED & packed.reasons.keys() - self.reasons.keys():
                logger.warning(
                    "device tensors of edge %s go through host memory, reason: %s", packed.sent.edge, why.value
                )
            self.reasons.update(packed.reasons)
            self.sent_bytes += packed.parcel.nbytes if packed.parcel is not None else 0

    def release(self, parcel: Parcel | None) -> None:
        """Free the blocks of a parcel that is not used any more. Idempotent."""
        with self._lock:
            if parcel is None or self._held.pop(id(parcel), None) is None:
                return
            self.released += 1
        for block in parcel.blocks:
            self._let_go(block)

    def held(self) -> list[Parcel]:
        """Return the parcels in flight."""
        with self._lock:
            return list(self._held.values())

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        with self._lock:
            tensors = sum(len(block.group.entries) for parcel in self._held.values() for block in parcel.blocks)
            other = {why.value: count for why, count in self.reasons.items() if why is not ShareReason.SHARED}
            return {
                "device_tensors": self.reasons[ShareReason.SHARED],
                "device_bytes": self.sent_bytes,
                "device_held": tensors,
                "device_held_bytes": self._held_bytes,
                "device_fallbacks": other,
            }

    def abandon(self) -> list[Any]:
        """Return what a forked child has inherited, and must not free."""
        self._lock = threading.Lock()
        inherited = list(self._held.values())
        self._held.clear()
        return inherited

    def _block(self, group: Group, message: Message) -> Block | ShareReason:
        why = self._reserve(group, message.edge)
        if why is ShareReason.HELD:
            self._make_room()
            why = self._reserve(group, message.edge)
        if why is not ShareReason.SHARED:
            return why
        made: Block | ShareReason = ShareReason.REFUSED
        try:
            made = self._shared(group, message)
        finally:
            if isinstance(made, ShareReason):
                self._give_back(group)
        return made

    def _let_go(self, block: Block) -> None:
        self._give_back(block.group)
        self._share.release(block.handle)

    def _give_back(self, group: Group) -> None:
        with self._lock:
            self._held_bytes -= group.nbytes

    def _reserve(self, group: Group, edge: Edge) -> ShareReason:
        """Decide whether to share a group, and if so, reserve its memory."""
        worth = group.nbytes >= self._options.min_bytes
        receivers = self._receivers(edge) if worth else ()
        obstacle = self._share.obstacle() if worth else None
        with self._lock:
            load = Load(group.device, group.nbytes, receivers, self._held_bytes, obstacle)
            why = plan(load, self._options.min_bytes, self._options.max_held_bytes)
            if why is ShareReason.SHARED:
                self._held_bytes += group.nbytes
        return why

    def _shared(self, group: Group, message: Message) -> Block | ShareReason:
        like = message.buffers[group.entries[0][0]]
        memory = self._share.allocate(like, group.nbytes)
        if isinstance(memory, ShareReason):
            return memory
        copy_to(memory, group, message)
        handle = self._share.share(memory)
        return handle if isinstance(handle, ShareReason) else Block(handle, memory, group)
