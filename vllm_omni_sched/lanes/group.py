"""Collectives between the lane processes of several ranks: frames over Unix sockets, and tensors in shared memory.

An encoder that is split between ranks exchanges tensors between its layers. Lanes cannot use the communicators of the
LLM for that: their calls would mix with those of the steps, and they wait by spinning. Depends on torch, not on vLLM.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import select
import socket
import struct
from array import array
from collections import deque
from dataclasses import dataclass, field

import torch

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import LaneGroupError, LanePeerError
from vllm_omni_sched.lanes.messages import map_memory

MEETING_SECONDS = 60.0
SILENCE_SECONDS = 600.0  # a peer may encode a long video at a low share before it takes part

_HEADER = struct.Struct("<QIBQQQ")  # job, call, kind, size and place of the body, size of new shared memory or 0
_TENSOR, _FAILED = 0, 1
_MOST_REASON_BYTES = 2000
_LATE = "the lanes of other ranks have not come in time"
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_REDUCED = (torch.float16, torch.bfloat16)
_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Frame:
    """A frame that is being sent: the part that is left, and the descriptor that goes with its first byte."""

    def __init__(self, header: bytes, words: bytes = b"", memory: int | None = None) -> None:
        self.left = memoryview(header + words)
        self.memory = memory

    def send(self, end: socket.socket) -> bool:
        """Send what the socket takes now; return whether that was the rest."""
        if self.memory is None:
            sent = end.send(self.left)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [self.memory]))
            sent = end.sendmsg([self.left], [rights])
            self.close()
        self.left = self.left[sent:]
        return not self.left.nbytes

    def close(self) -> None:
        """Close the descriptor, if it was not sent."""
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None


@dataclass
class _Peer:
    """Connects this rank to another one; holds the frames to send, and the part of a frame that was read.

    ``memory``: the shared memory that the other rank writes its tensors to, once it has sent it.
    """

    rank: int
    end: socket.socket
    out: deque[_Frame] = field(default_factory=deque)
    header: bytearray = field(default_factory=bytearray)
    words: bytearray = field(default_factory=bytearray)  # of a failure
    descriptors: list[int] = field(default_factory=list)  # that came with this frame
    memory: torch.Tensor | None = None

    def read_header(self) -> None:
        """Read what there is of a header, and the descriptor that comes with it."""
        missing = _HEADER.size - len(self.header)
        found, rights, _, _ = self.end.recvmsg(missing, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not found:
            raise ConnectionResetError("it has closed the connection")
        self.header += found
        for _, _, data in rights:
            self.descriptors += array("i", data)

    def map_memory(self, size: int) -> None:
        """Map the memory that came with this frame, in place of what this rank has sent before."""
        try:
            if not self.descriptors:  # the kernel drops it without an error
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.memory = map_memory(self.descriptors[0], size)
        except OSError as error:
            raise LaneGroupError(f"the memory of rank {self.rank} cannot be shared: {error}") from None
        finally:
            self._close_descriptors()

    def close(self) -> None:
        """Close the connection and all descriptors."""
        self.end.close()
        for frame in self.out:
            frame.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class _Slots:
    """Shared memory of one rank, with two slots that its tensors are written to in turn.

    ``descriptor``: of the memory file, for the caller to close.
    """

    def __init__(self, size: int) -> None:
        self.size = _aligned(size)
        self.descriptor = os.memfd_create("omni-sched-lane-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, 2 * self.size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = map_memory(self.descriptor, 2 * self.size)
        except OSError:
            os.close(self.descriptor)
            raise
        self._next = 0

    def write(self, tensor: torch.Tensor) -> int:
        """Copy a tensor into the next slot, and return its place in bytes."""
        place, self._next = self._next, self.size - self._next
        _tensor_at(self.memory, place, tensor).copy_(tensor)
        return place


class LaneGroup:
    """Exchanges tensors with the lanes of the other ranks of an engine, which run the same jobs in the same order.

    1. In a job, all ranks make the same calls of `exchange`. Each frame carries the numbers of the job and the call.
    2. A rank whose job fails tells the others by `fail`; their calls in that job raise `LanePeerError`. What is left
       of the job's frames is skipped in later jobs.
    3. If the process of a rank ends, is silent for ``silence`` seconds, or makes another call, every call raises
       `LaneGroupError`.
    4. Waiting for others takes no processor time. ``idle_seconds`` counts it, so that it does not pass for work.
    5. Each rank writes its tensors to two slots of shared memory in turn, and the others read them there. Once all
       ranks have sent the frame of a call, no rank reads the slots of the call before, which are then written again.
    6. After a job that failed, a rank writes to new shared memory, because a third rank may still read both slots. It
       also does so for a tensor larger than the slots, and after a job whose tensors were much smaller than these.

    Args:
        rank: rank of this process.
        ends: a connected stream socket for each other rank.
        silence: most seconds without progress.
    """

    _LEAST_USED = 1 / 8  # of a slot

    def __init__(self, rank: int, ends: dict[int, socket.socket], silence: float = SILENCE_SECONDS) -> None:
        self.rank, self.size = rank, len(ends) + 1
        self.idle_seconds = 0.0
        self._silence = silence
        self._peers = [_Peer(other, end) for other, end in sorted(ends.items())]
        self._job = self._call = 0
        self._slots: _Slots | None = None
        self._largest = 0  # tensor of this job, in bytes
        for peer in self._peers:
            peer.end.setblocking(False)

    def begin(self) -> None:
        """Begin the next job."""
        if self._slots is not None and self._largest < self._LEAST_USED * self._slots.size:
            self._slots = None
        self._job += 1
        self._call = self._largest = 0

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this job has failed here.

        Raises:
            LaneGroupError: see rule 3.
        """
        self._slots = None
        words = reason.encode()[:_MOST_REASON_BYTES]
        self._post(_FAILED, len(words), words=words)
        self._run({})

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that the ranks pass to this call, in the order of ranks; all have the same shape.

        Raises:
            LanePeerError: the job failed at another rank.
            LaneGroupError: see rule 3.
        """
        parts = self._parts(tensor)
        return [part if rank == self.rank else part.clone() for rank, part in enumerate(parts)]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, which is the same on each: added in their order, and in float32 at least."""
        first, *others = self._parts(tensor)
        total = first.to(torch.float32) if tensor.dtype in _REDUCED else first
        if not others:
            return total.to(tensor.dtype, copy=True)
        total = total + others[0]
        for part in others[1:]:
            total += part
        return total.to(tensor.dtype)

    def close(self) -> None:
        """Close all connections; the other ranks' calls then raise `LaneGroupError`."""
        for peer in self._peers:
            peer.close()

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what `exchange` returns, except that tensors of others may change in the next call."""
        self._call += 1
        place = 0
        memory: _Slots | None = None
        if tensor.nbytes:
            self._largest = max(self._largest, tensor.nbytes)
            if self._slots is None or self._slots.size < tensor.nbytes:
                self._slots = memory = _Slots(tensor.nbytes)
            place = self._slots.write(tensor)
        self._post(_TENSOR, tensor.nbytes, place, memory)
        places = self._run({peer.rank: tensor.nbytes for peer in self._peers})
        parts = {self.rank: tensor.contiguous()}
        for peer in self._peers:
            parts[peer.rank] = self._read(peer, places[peer.rank], tensor)
        return [parts[rank] for rank in range(self.size)]

    @staticmethod
    def _read(peer: _Peer, place: int, like: torch.Tensor) -> torch.Tensor:
        if not like.nbytes:
            return torch.empty_like(like)
        if peer.memory is None or place % _ALIGNMENT or place + like.nbytes > peer.memory.nbytes:
            raise LaneGroupError(f"rank {peer.rank} has named memory that it has not shared")
        return _tensor_at(peer.memory, place, like)

    # -- frames ------------------------------------------------------------

    def _post(self, kind: int, size: int, place: int = 0, memory: _Slots | None = None, words: bytes = b"") -> None:
        """Queue a frame for all ranks; ``memory``: where the tensors are from now on, if the ranks do not know yet."""
        header = _HEADER.pack(self._job, self._call, kind, size, place, 0 if memory is None else memory.memory.nbytes)
        try:
            for peer in self._peers:
                peer.out.append(_Frame(header, words, None if memory is None else os.dup(memory.descriptor)))
        finally:
            if memory is not None:
                os.close(memory.descriptor)

    def _run(self, wanted: dict[int, int]) -> dict[int, int]:
        """Send all that is posted, and receive this call's frame from each rank of ``wanted``; none if this job failed.

        Frames of earlier jobs, and of a job that failed here, are skipped.

        Args:
            wanted: size of the tensor that each rank must pass.

        Returns:
            The place of each rank's tensor in its memory.
        """
        places: dict[int, int] = {}
        while True:
            for peer in self._peers:
                try:
                    self._advance(peer, wanted, places)
                except OSError as error:
                    raise LaneGroupError(f"the lane of rank {peer.rank} has ended: {error}") from None
            waiting = select.poll()
            done = True
            for peer in self._peers:
                events = select.POLLOUT if peer.out else 0
                events |= select.POLLIN if self._reads(peer, wanted, places) else 0
                if events:
                    waiting.register(peer.end, events)
                    done = False
            if done:
                return places
            begun = monotonic_seconds()
            ready = waiting.poll(self._silence * 1e3)
            self.idle_seconds += monotonic_seconds() - begun
            if not ready:
                raise LaneGroupError(f"no other rank has sent or taken anything for {self._silence:g} seconds")

    def _reads(self, peer: _Peer, wanted: dict[int, int], places: dict[int, int]) -> bool:
        """Return whether a frame of this rank is to be read: one that is wanted, or one that keeps it from reading."""
        if wanted:
            return peer.rank not in places
        return bool(peer.out) and not self._is_ahead(peer)

    def _advance(self, peer: _Peer, wanted: dict[int, int], places: dict[int, int]) -> None:
        """Send and receive what is possible without waiting."""
        with contextlib.suppress(BlockingIOError):
            while peer.out:
                if peer.out[0].send(peer.end):
                    peer.out.popleft()
        with contextlib.suppress(BlockingIOError):
            while self._reads(peer, wanted, places):
                place = self._receive(peer, wanted.get(peer.rank))
                if place is not None:
                    places[peer.rank] = place

    def _is_ahead(self, peer: _Peer) -> bool:
        """Return whether the frame at the head of this connection belongs to a later job."""
        return len(peer.header) == _HEADER.size and int(_HEADER.unpack(peer.header)[0]) > self._job

    def _receive(self, peer: _Peer, wanted: int | None) -> int | None:
        """Read what there is of one frame; if that completes this call's frame, return the place of its tensor.

        Args:
            peer: the connection.
            wanted: size of the tensor of this call; None if this job failed.
        """
        if len(peer.header) < _HEADER.size:
            peer.read_header()
            if len(peer.header) < _HEADER.size:
                return None
        job, call, kind, size, place, memory = _HEADER.unpack(peer.header)
        if job > self._job:
            if wanted is not None:
                raise LaneGroupError(f"rank {peer.rank} is at job {job}, and this rank at job {self._job}")
            return None
        if kind == _FAILED and len(peer.words) < size:
            peer.words += _read(peer.end, size - len(peer.words))
            if len(peer.words) < size:
                return None
        if memory:
            peer.map_memory(memory)
        words, peer.header, peer.words = peer.words, bytearray(), bytearray()
        if job < self._job or wanted is None:
            return None
        if kind == _FAILED:
            self._slots = None
            raise LanePeerError(f"it failed at rank {peer.rank}: {words.decode(errors='replace')}")
        if (call, size) != (self._call, wanted):
            raise LaneGroupError(
                f"rank {peer.rank} has made call {call} with {size} bytes, and this rank call {self._call} with "
                f"{wanted}"
            )
        return int(place)


def _read(end: socket.socket, size: int) -> bytes:
    found = end.recv(size)
    if not found:
        raise ConnectionResetError("it has closed the connection")
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _tensor_at(memory: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor of this shape and type that begins at this place of the memory."""
    return memory[place : place + like.nbytes].view(like.dtype).view(like.shape)


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
