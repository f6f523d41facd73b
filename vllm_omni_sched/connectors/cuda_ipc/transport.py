"""Transport through the arena, with device tensors that stay on their device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import ConnectorError, DeviceLostError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.cuda_ipc.board import Board
from vllm_omni_sched.connectors.cuda_ipc.cuda import CudaShare
from vllm_omni_sched.connectors.cuda_ipc.sending import BlockSender
from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcOptions, ShareReason
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message, message_of
from vllm_omni_sched.connectors.transport import Health
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

NO_DEVICE = "no CUDA device in this process: all tensors go through host memory"
MakeShare = Callable[[Callable[[], str], Callable[[str], bool]], CudaShare]

_outlived: list[Any] = []
"""Blocks that receivers still have when their transport closes, and those of the parent of a fork.

torch warns of the former when this process exits ("Producer process has been terminated before all shared CUDA tensors
released"). It is right: a receiver that still reads them loses them.
"""


def _has_changed(blocks: BlockSender, released: int) -> bool:
    return blocks.released != released


@contextlib.contextmanager
def _as_device_lost(what: str) -> Iterator[None]:
    """Raise `DeviceLostError` for a failing device or a lack of memory, which is not a damaged message."""
    try:
        yield
    except ConnectorError:
        raise
    except (RuntimeError, MemoryError) as error:
        raise DeviceLostError(f"a tensor cannot be {what} now: {error}") from error


@lru_cache
def _log_missing_device() -> None:
    """Log once that there is no device, although a stage has several connectors."""
    logger.warning("%s", NO_DEVICE)


def has_cuda() -> bool:
    """Return whether there is a device, without initialising it."""
    import torch

    return bool(torch.backends.cuda.is_built() and torch.cuda.device_count())


class CudaIpcTransport(ArenaTransport):
    """Transport through an arena that leaves the device tensors of messages on their device.

    1. What was put is copied on the device first: its sender may write to its own tensors at once.
    2. The copy is held while its message waits or its receiver uses it: it follows the lease that the arena keeps on
       the message, also when a receiver was killed.
    3. Where `plan` says no, tensors go through host memory, arrive there, and are counted by reason.
    4. A sender that closes moves messages that were not received to host memory. The copies of a killed sender are
       lost.

    Args:
        arena: options of the arena that messages go through.
        share: makes the `CudaShare`, of what names this process and of what tells whether another lives; default:
            CUDA IPC where there is a device; elsewhere it warns, and this is an arena.
    """

    name = "cuda_ipc"

    def __init__(
        self,
        options: CudaIpcOptions,
        arena: ArenaOptions,
        share: MakeShare | None = None,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        self._share: CudaShare | None = None
        self._sender_of_blocks: BlockSender | None = None
        super().__init__(arena, clock, sleep)
        self._device_options = options
        self._board = Board(self.directory, clock)
        if share is not None or has_cuda():
            self._share = (share or CudaShare)(self._token, self._is_alive)
            self._sender_of_blocks = BlockSender(options, self._share, self._receivers, self.reap)
        else:
            _log_missing_device()
        self._board.tidy()
        self._ends = False  # from here on tensors go through host memory, which outlives this process
        self._device_opened = self._device_opened_bytes = self._device_lost = 0

    def put(self, message: Message, deadline: float | None = None) -> int:
        blocks = self._sender_of_blocks
        if blocks is None or self._ends:
            return super().put(message, deadline)
        while True:
            released = blocks.released
            packed = blocks.pack(message)
            parcel = packed.parcel
            # if tensors go through host memory because `max_held_bytes` are held, pack again when blocks were released
            held = packed.reasons[ShareReason.HELD] > 0
            unless = partial(_has_changed, blocks, released) if held else None
            try:
                held_bytes = self.put_unless(packed.sent, deadline, unless)
            except BaseException:
                blocks.release(parcel)
                raise
            if held_bytes is not None:
                blocks.count(packed)
                return held_bytes + (parcel.nbytes if parcel is not None else 0)
            blocks.release(parcel)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        """See `Transport.get`.

        Raises:
            DeviceLostError: the device of its tensors cannot be reached, or its sender was killed; it is dropped.
        """
        if not self._closed:
            self._collect()
            self._post(edge, self._share.devices() if self._share is not None else frozenset())
        arrival = super().get(edge, key)
        if arrival is not None:
            try:
                arrival.fetch(self._open)
            except DeviceLostError:
                self._device_lost += 1
                raise
        return arrival

    def reap(self, limit: int | None = None) -> int:
        gone = super().reap(limit)
        self._collect()
        return gone

    def _make_locks(self) -> None:
        super()._make_locks()
        self._board_lock = threading.Lock()

    def _look_after(self) -> None:
        super()._look_after()
        self._collect()

    def _facts(self) -> dict[str, Any]:
        facts = super()._facts() | {"device_lost": self._device_lost}
        if self._sender_of_blocks is not None:
            facts |= self._sender_of_blocks.facts()
            facts |= {"device_opened": self._device_opened, "device_opened_bytes": self._device_opened_bytes}
        return facts

    def health(self) -> Health:
        health = super().health()
        return replace(health, reason=health.reason or NO_DEVICE) if self._share is None else health

    def _before_close(self) -> None:
        self._ends = True
        if self._sender_of_blocks is not None:
            with contextlib.suppress(ConnectorError):
                self.reap()
            self._move_to_host(self._sender_of_blocks)
            with contextlib.suppress(ConnectorError):
                self.reap()
            _outlived.extend(self._sender_of_blocks.held())

    def _close(self) -> None:
        super()._close()
        if self._share is not None:
            self._share.collect()
        with self._board_lock:
            self._board.close()

    def _abandon(self) -> None:
        super()._abandon()
        if self._sender_of_blocks is not None and self._share is not None:
            _outlived.extend(self._sender_of_blocks.abandon())
            self._share.abandon()

    def _collect(self) -> None:
        if self._share is not None and not self._closed:
            self._share.collect()

    def _move_to_host(self, blocks: BlockSender) -> None:
        """Move messages that were not received to host memory, because blocks are lost with this process."""
        for parcel in blocks.held():
            try:
                arrival = super().get(parcel.edge, parcel.key)  # it waits again if this process is killed
                if arrival is not None:
                    arrival.fetch(self._own_on_host)
                    super().put(message_of(arrival, parcel.edge, parcel.key))
                del arrival
            except RuntimeError as error:  # of the arena, or of a driver that is shutting down
                self._device_lost += 1
                logger.error("message %r of edge %s is lost at close: %s", parcel.key[:80], parcel.edge, error)

    def _open(self, handle: bytes, keep: Any) -> Any:
        with _as_device_lost("opened"):
            block = self._opener().open(handle, keep, self._device_options.copy_out)
        self._device_opened += 1
        self._device_opened_bytes += block.numel()
        return block

    def _own_on_host(self, handle: bytes, keep: Any) -> Any:
        with _as_device_lost("copied to the host"):
            return self._opener().open(handle, keep, copy=False).cpu().numpy()

    def _opener(self) -> CudaShare:
        if self._share is None:  # it was put before this process had said so
            raise DeviceLostError("a tensor is on a device, and this process has none")
        return self._share

    def _post(self, edge: Edge, devices: frozenset[str]) -> None:
        """Announce the devices that can be opened here; if that fails, senders use host memory."""
        with self._board_lock, contextlib.suppress(OSError):
            self._board.post(edge, devices)

    def _receivers(self, edge: Edge) -> Sequence[frozenset[str]]:
        with self._board_lock:
            try:
                return self._board.receivers(edge)
            except OSError:
                return ()

    def _token(self) -> str:
        with self._board_lock:
            return self._board.token()

    def _is_alive(self, token: str) -> bool:
        return self._board.is_alive(token)
