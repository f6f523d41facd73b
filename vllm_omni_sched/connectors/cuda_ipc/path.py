"""The arena, with device tensors that stay on their device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.connectors.arena import ArenaPath
from vllm_omni_sched.connectors.base import Edge, Health, Lease, Path, Traffic
from vllm_omni_sched.connectors.cuda_ipc.board import Board
from vllm_omni_sched.connectors.cuda_ipc.cuda import CudaShare
from vllm_omni_sched.connectors.cuda_ipc.options import CudaIpcOptions
from vllm_omni_sched.connectors.cuda_ipc.sending import Sending
from vllm_omni_sched.connectors.cuda_ipc.share import DeviceShare
from vllm_omni_sched.connectors.framing import Arrival, Message, message_of
from vllm_omni_sched.connectors.lifetime import Lifetimes
from vllm_omni_sched.errors import ConnectorError, CorruptMessageError, DeviceLostError
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

NO_DEVICE = "no CUDA device in this process: all tensors go through host memory"
MakeShare = Callable[[Callable[[], str], Callable[[str], bool]], DeviceShare]

_lifetimes = Lifetimes()  # made after those of arenas, which these stand on
_outlived: list[Any] = []
"""Blocks that receivers still have when their path closes, and those of the parent of a fork."""


def _has_changed(sending: Sending, released: int) -> bool:
    return sending.released != released


def _never() -> bool:
    return False


@contextlib.contextmanager
def _told_as_lost(what: str) -> Iterator[None]:
    """Raise `DeviceLostError` for a failing device or a lack of memory, which is not a damaged message."""
    try:
        yield
    except ConnectorError:
        raise
    except (RuntimeError, MemoryError) as error:
        raise DeviceLostError(f"a tensor cannot be {what} now: {error}") from error


@lru_cache
def _say_no_device() -> None:
    """Log once that there is no device, although a stage has several connectors."""
    logger.warning("%s", NO_DEVICE)


def has_cuda() -> bool:
    """Return whether there is a device, without initialising it."""
    import torch

    return bool(torch.backends.cuda.is_built() and torch.cuda.device_count())


class CudaIpcPath(Path):
    """An arena whose messages leave their device tensors on the device.

    1. What was put is copied on the device first: its sender may write to its own tensors at once.
    2. The copy is held as long as its message is on its way or its receiver looks at it, and no longer: the lease that
       the arena keeps on the message says so, also when a receiver was killed.
    3. Where `plan` says no, tensors go through host memory, arrive there, and are counted by reason.
    4. A sender that closes moves what nobody has got to host memory. One that is killed takes its copies along.

    Args:
        arena: what messages go through; closed with this path.
        share: makes the `DeviceShare`, of what names this process and of what tells whether another lives; default:
            CUDA IPC where there is a device, nothing elsewhere: it warns, and is an arena.
    """

    name = "cuda_ipc"

    def __init__(
        self,
        options: CudaIpcOptions,
        arena: ArenaPath,
        share: MakeShare | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self._options, self._arena = options, arena
        self._board, self._board_lock = Board(arena.directory, clock), threading.Lock()
        self._share: DeviceShare | None = None
        self._sending: Sending | None = None
        if share is not None or has_cuda():
            self._share = (share or CudaShare)(self._token, self._is_alive)
            self._sending = Sending(options, self._share, self._receivers, arena.reap)
        else:
            _say_no_device()
        self._board.tidy()
        self._closed = False
        self._opened = self._opened_bytes = self._lost = 0
        _lifetimes.add(self)

    def put(self, message: Message, deadline: float | None = None) -> int:
        sending = self._sending
        if sending is None or self._closed:
            return self._arena.put(message, deadline)
        while True:
            released = sending.released
            packed = sending.pack(message)
            sent, parcel = packed.sent, packed.parcel
            # what waits for host memory because too much is held on the device can go there when that has changed
            unless = partial(_has_changed, sending, released) if packed.is_held_back else _never
            try:
                held_bytes = self._arena.put_unless(sent, deadline, unless)
            except BaseException:
                sending.release(parcel)
                raise
            if held_bytes is not None:
                sending.count(packed)
                return held_bytes + (parcel.nbytes if parcel is not None else 0)
            sending.release(parcel)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        """See `Path.get`.

        Raises:
            DeviceLostError: the device of its tensors cannot be reached, or its sender was killed; it is dropped.
        """
        if not self._closed:
            if self._share is not None:
                self._share.collect()
            self._post(edge, self._share.devices() if self._share is not None else frozenset())
        arrival = self._arena.get(edge, key)
        if arrival is not None:
            try:
                arrival.fetch(self._open)
            except DeviceLostError:
                self._lost += 1
                raise
        return arrival

    def holds(self, edge: Edge, key: str) -> bool:
        return self._arena.holds(edge, key)

    def lease(self, edge: Edge, key: str) -> Lease | None:
        """See `Path.lease`; its tensors are copied to the host.

        Raises:
            DeviceLostError: the device fails, or there is no host memory; receivers can get it still.
        """
        lease = self._arena.lease(edge, key)
        if lease is not None:
            try:
                lease.arrival.fetch(self._own_on_host)
            except CorruptMessageError:
                lease.consume()
                raise
            except BaseException:  # nobody else would end it as long as this process lives
                lease.give_back()
                raise
        return lease

    def withdraw(self, edge: Edge, key: str) -> bool:
        return self._arena.withdraw(edge, key)

    def discard(self, key: str) -> int:
        return self._arena.discard(key)

    def reap(self, limit: int | None = None) -> int:
        gone = self._arena.reap(limit)
        if self._share is not None and not self._closed:
            self._share.collect()
        return gone

    def traffic(self) -> dict[tuple[str, Edge], Traffic]:
        return {(self.name, edge): traffic for (_, edge), traffic in self._arena.traffic().items()}

    def health(self) -> Health:
        if self._share is not None and not self._closed:
            self._share.collect()
        health = self._arena.health()
        facts = dict(health.facts)
        if self._sending is None:
            return replace(health, reason=health.reason or NO_DEVICE, facts=facts | {"device_lost": self._lost})
        facts |= self._sending.facts()
        facts |= {"device_opened": self._opened, "device_opened_bytes": self._opened_bytes, "device_lost": self._lost}
        return replace(health, facts=facts)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._sending is not None:
            with contextlib.suppress(ConnectorError):
                self._arena.reap()
            self._move_to_host(self._sending)
            _outlived.extend(self._sending.held())
        self._arena.close()
        if self._share is not None:
            self._share.collect()
        with self._board_lock:
            self._board.close()

    def abandon(self) -> None:
        """Release what a forked child has inherited: it belongs to the parent."""
        self._board_lock, self._closed = threading.Lock(), True
        if self._sending is not None and self._share is not None:
            _outlived.extend(self._sending.abandon())
            self._share.abandon()

    def _move_to_host(self, sending: Sending) -> None:
        """Move messages that were not received to host memory, because blocks are lost with this process."""
        for parcel in sending.held():
            try:
                lease = self.lease(parcel.edge, parcel.key)
                if lease is not None:
                    self._arena.put(message_of(lease.arrival, parcel.edge, parcel.key))
                    lease.consume()
            except RuntimeError as error:  # of the arena, or of a driver that is shutting down
                self._lost += 1
                logger.error("message %r of edge %s is lost at close: %s", parcel.key[:80], parcel.edge, error)

    def _open(self, handle: bytes, keep: Any) -> Any:
        with _told_as_lost("opened"):
            block = self._opener().open(handle, keep, self._options.copy_out)
        self._opened += 1
        self._opened_bytes += block.numel()
        return block

    def _own_on_host(self, handle: bytes, keep: Any) -> Any:
        with _told_as_lost("copied to the host"):
            return self._opener().open(handle, keep, copy=False).cpu().numpy()

    def _opener(self) -> DeviceShare:
        if self._share is None:  # it was put before this process had said so
            raise DeviceLostError("a tensor lies on a device, and this process has none")
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
