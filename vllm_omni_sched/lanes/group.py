"""Collectives between the lane processes of several ranks, over Unix sockets.

An encoder that is split between ranks exchanges tensors between its layers. Lanes cannot use the communicators of the
LLM for that: their calls would mix with those of the steps, and they wait by spinning. Depends on torch, not on vLLM.
"""

import contextlib
import hashlib
import os
import selectors
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

import torch

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import LaneGroupError, LanePeerError

MEETING_SECONDS = 60.0
SILENCE_SECONDS = 600.0  # a peer may encode a long video at a low share before it takes part

_HEADER = struct.Struct("<QIBQ")  # job, call, kind, size of the body in bytes
_TENSOR, _FAILED = 0, 1
_MOST_REASON_BYTES = 2000
_LATE = "the lanes of other ranks have not come in time"
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_REDUCED = (torch.float16, torch.bfloat16)


@dataclass
class _Peer:
    """Connects this rank to another one; holds what is still to be sent, and the part of a frame that was read."""

    rank: int
    end: socket.socket
    out: deque[memoryview] = field(default_factory=deque)
    header: bytearray = field(default_factory=bytearray)
    body: memoryview | None = None  # of that frame; None while its header is read
    left: memoryview = field(default_factory=lambda: memoryview(b""))  # the part of the body that was not read


class LaneGroup:
    """Exchanges tensors with the lanes of the other ranks of an engine, which run the same jobs in the same order.

    1. In a job, all ranks make the same calls of `exchange`. Each frame carries the numbers of the job and the call.
    2. A rank whose job fails tells the others by `fail`; their calls in that job raise `LanePeerError`. What is left
       of the job's frames is skipped in later jobs.
    3. If the process of a rank ends, is silent for ``silence`` seconds, or makes another call, every call raises
       `LaneGroupError`.
    4. Waiting for others takes no processor time. ``idle_seconds`` counts it, so that it does not pass for work.

    Args:
        rank: rank of this process.
        ends: a connected stream socket for each other rank.
        silence: most seconds without progress.
    """

    def __init__(self, rank: int, ends: dict[int, socket.socket], silence: float = SILENCE_SECONDS) -> None:
        self.rank, self.size = rank, len(ends) + 1
        self.idle_seconds = 0.0
        self._silence = silence
        self._peers = [_Peer(other, end) for other, end in sorted(ends.items())]
        self._job = self._call = 0
        for peer in self._peers:
            peer.end.setblocking(False)

    def begin(self) -> None:
        """Begin the next job."""
        self._job += 1
        self._call = 0

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this job has failed here.

        Raises:
            LaneGroupError: see rule 3.
        """
        words = memoryview(reason.encode()[:_MOST_REASON_BYTES])
        self._post(_FAILED, words)
        self._run({})

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that the ranks pass to this call, in the order of ranks; all have the same shape.

        Raises:
            LanePeerError: the job failed at another rank.
            LaneGroupError: see rule 3.
        """
        self._call += 1
        parts = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        parts = [part.contiguous() for part in parts]
        self._post(_TENSOR, _bytes_of(parts[self.rank]))
        self._run({peer.rank: _bytes_of(parts[peer.rank]) for peer in self._peers})
        return parts

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, which is the same on each: added in their order, and in float32 at least."""
        parts = self.exchange(tensor)
        total = parts[0].to(torch.float32) if tensor.dtype in _REDUCED else parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.to(tensor.dtype)

    def close(self) -> None:
        """Close all connections; the other ranks' calls then raise `LaneGroupError`."""
        for peer in self._peers:
            peer.end.close()

    # -- frames ------------------------------------------------------------

    def _post(self, kind: int, body: memoryview) -> None:
        header = memoryview(_HEADER.pack(self._job, self._call, kind, body.nbytes))
        for peer in self._peers:
            peer.out.append(header)
            if body.nbytes:
                peer.out.append(body)

    def _run(self, wanted: dict[int, memoryview]) -> None:
        """Send all that is posted, and receive this call's frame from each rank of ``wanted``; none if this job failed.

        Frames of earlier jobs, and of a job that failed here, are skipped.
        """
        failed = not wanted
        with selectors.DefaultSelector() as selector:
            while True:
                for peer in self._peers:
                    reads = peer.rank in wanted or (failed and peer.out and not self._is_ahead(peer))
                    writes = selectors.EVENT_WRITE if peer.out else 0
                    _watch(selector, peer, writes | (selectors.EVENT_READ if reads else 0))
                if not selector.get_map():
                    return
                begun = monotonic_seconds()
                ready = selector.select(self._silence)
                self.idle_seconds += monotonic_seconds() - begun
                if not ready:
                    raise LaneGroupError(f"no other rank has sent or taken anything for {self._silence:g} seconds")
                for key, events in ready:
                    peer = key.data
                    try:
                        if events & selectors.EVENT_WRITE:
                            _send(peer)
                        if events & selectors.EVENT_READ and self._receive(peer, wanted.get(peer.rank)):
                            del wanted[peer.rank]
                    except BlockingIOError:  # it was ready for less than that
                        continue
                    except OSError as error:
                        raise LaneGroupError(f"the lane of rank {peer.rank} has ended: {error}") from None

    def _is_ahead(self, peer: _Peer) -> bool:
        """Return whether the frame at the head of this connection belongs to a later job."""
        return len(peer.header) == _HEADER.size and int(_HEADER.unpack(peer.header)[0]) > self._job

    def _receive(self, peer: _Peer, wanted: memoryview | None) -> bool:
        """Read what there is of one frame; return whether that was this call's frame, and is complete.

        Args:
            peer: the connection.
            wanted: where the body of this call's frame goes; None if this job failed.
        """
        if len(peer.header) < _HEADER.size:
            peer.header += _read(peer.end, _HEADER.size - len(peer.header))
            if len(peer.header) < _HEADER.size:
                return False
        job, call, kind, size = _HEADER.unpack(peer.header)
        now = job == self._job and wanted is not None
        if peer.body is None:
            if job > self._job:
                if wanted is not None:
                    raise LaneGroupError(f"rank {peer.rank} is at job {job}, and this rank at job {self._job}")
                return False
            if wanted is None or job < self._job or kind == _FAILED:
                body = memoryview(bytearray(size))
            elif (call, size) == (self._call, wanted.nbytes):
                body = wanted
            else:
                raise LaneGroupError(
                    f"rank {peer.rank} has made call {call} with {size} bytes, and this rank call {self._call} with "
                    f"{wanted.nbytes}"
                )
            peer.body = peer.left = body
        if peer.left.nbytes:
            peer.left = peer.left[_read_into(peer.end, peer.left) :]
        if peer.left.nbytes:
            return False
        whole, peer.header, peer.body = peer.body, bytearray(), None
        if now and kind == _FAILED:
            raise LanePeerError(f"it failed at rank {peer.rank}: {bytes(whole).decode(errors='replace')}")
        return now


def _watch(selector: selectors.BaseSelector, peer: _Peer, events: int) -> None:
    known = selector.get_map().get(peer.end.fileno())
    if known is None:
        if events:
            selector.register(peer.end, events, peer)
    elif not events:
        selector.unregister(peer.end)
    elif known.events != events:
        selector.modify(peer.end, events, peer)


def _send(peer: _Peer) -> None:
    sent = peer.end.send(peer.out[0])
    peer.out[0] = peer.out[0][sent:]
    if not peer.out[0].nbytes:
        peer.out.popleft()


def _read(end: socket.socket, size: int) -> bytes:
    found = end.recv(size)
    if not found:
        raise ConnectionResetError("it has closed the connection")
    return found


def _read_into(end: socket.socket, body: memoryview) -> int:
    size = end.recv_into(body)
    if not size:
        raise ConnectionResetError("it has closed the connection")
    return size


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")


# -- the meeting of the ranks ----------------------------------------------


def join_group(
    secret: str,
    generation: int,
    rank: int,
    ranks: int,
    *,
    timeout: float = MEETING_SECONDS,
    silence: float = SILENCE_SECONDS,
) -> LaneGroup:
    """Connect this process to those that join the same generation as the other ranks, and return their group.

    The sockets have names of the abstract namespace, which the kernel removes with the process. They cannot be guessed
    without ``secret``, and processes of other users are refused on both sides.

    Args:
        secret: the same for all ranks of an engine, and for no other engine.
        generation: counts the groups of this engine.
        rank: rank of this process; every rank below ``ranks`` joins once.
        ranks: number of ranks.
        timeout: most seconds to wait for the others.
        silence: as for `LaneGroup`.

    Raises:
        LaneGroupError: the others did not come in time.
    """
    until = monotonic_seconds() + timeout
    ends: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as unless_all_come:
        unless_all_come.callback(_close_all, ends)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(_name(secret, generation, rank))
            listener.listen(ranks)
            for other in range(rank):
                ends[other] = _connect(_name(secret, generation, other), rank, other, until)
            while len(ends) < ranks - 1:
                _accept(listener, ends, until)
        unless_all_come.pop_all()
    return LaneGroup(rank, ends, silence)


def _close_all(ends: dict[int, socket.socket]) -> None:
    for end in ends.values():
        end.close()


def _name(secret: str, generation: int, rank: int) -> str:
    digest = hashlib.sha256(f"{secret}/{generation}/{rank}".encode()).hexdigest()
    return f"\0omni-sched-lane-{digest}"


def _connect(name: str, rank: int, other: int, until: float) -> socket.socket:
    while True:
        left = _left(until)
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.settimeout(left)
            end.connect(name)
            if _is_ours(end):
                end.sendall(_RANK.pack(rank))
                return end
            raise ConnectionRefusedError("it is the socket of another user")
        except ConnectionRefusedError:  # it does not listen yet
            end.close()
            sleep_seconds(0.01)
        except OSError as error:
            end.close()
            raise LaneGroupError(f"the lane of rank {other} cannot be reached: {error}") from None


def _accept(listener: socket.socket, ends: dict[int, socket.socket], until: float) -> None:
    listener.settimeout(_left(until))
    try:
        end, _ = listener.accept()
    except TimeoutError:
        raise LaneGroupError(_LATE) from None
    end.settimeout(1.0)  # it sends its rank at once
    try:
        if not _is_ours(end):
            raise ConnectionRefusedError("it is a process of another user")
        ends[_RANK.unpack(end.recv(_RANK.size, socket.MSG_WAITALL))[0]] = end
    except (OSError, struct.error):
        end.close()


def _left(until: float) -> float:
    left = until - monotonic_seconds()
    if left <= 0:
        raise LaneGroupError(_LATE)
    return left


def _is_ours(end: socket.socket) -> bool:
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.getuid()
