"""The facts that the headers of a packet give, and the state that readers of packets share."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PacketFacts(NamedTuple):
    """Facts on one packet.

    Attributes:
        start: whether decoding may begin here, see `PacketFlag.START`.
        droppable: whether no frame of the same or a lower layer needs its frame.
        layer: temporal layer; only droppable frames of the highest one are needed by no frame at all.
        irregular: whether it does not hold exactly one frame.
        display: rank of its frame in the order in which a decoder outputs frames; of equal ranks, the frame decoded
            first comes first. None if unknown from the headers that were read.
        frames: number of frames that it adds to those that are shown; 1 if unknown.
    """

    start: bool = False
    droppable: bool = False
    layer: int = 0
    irregular: bool = False
    display: int | None = None
    frames: int = 1


class PacketReader(Protocol):
    """Reads the packets of one stream, in decode order."""

    def read(self, data: bytes, key: bool) -> PacketFacts:
        """Return the facts of the next packet; ``key`` is the container's key frame mark.

        Raises:
            EndOfBits: its headers are truncated.
        """


class PictureOrder:
    """Computes ranks of pictures whose headers hold the low bits of a restarting count, as in H.264 and HEVC.

    Counts differ by less than 2^31, so that the ranks of one sequence come before all of the next.
    """

    def __init__(self) -> None:
        self._sequence = self._high = self._low = 0

    def begin(self) -> None:
        """Begin a sequence: its counts start from 0, and its pictures come after all earlier ones."""
        self._sequence += 1
        self._high = self._low = 0

    def rank(self, low: int, bits: int, *, counts: bool) -> int:
        """Return the rank of the next picture (H.264 8.2.1.1, HEVC 8.3.1).

        Args:
            low: low bits of its count.
            bits: number of these bits.
            counts: whether later pictures are counted from it.
        """
        half, high = 1 << bits - 1, self._high
        if self._low - low >= half:
            high += 1 << bits
        elif low - self._low > half:
            high -= 1 << bits
        if counts:
            self._high, self._low = high, low
        return (self._sequence << 33) + high + low


class ParameterSets:
    """Tracks whether a decoder that begins at a packet knows the stream's parameters at that point.

    It knows the parameter sets of the container. It knows sets that came in packets, and are not the container's, only
    if the packet at which it begins carries them again.
    """

    def __init__(self) -> None:
        self._of_container: dict[tuple[int, int], bytes] = {}
        self._in_packets: set[tuple[int, int]] = set()
        self._here: set[tuple[int, int]] = set()

    def of_container(self, kind: int, number: int, content: bytes) -> None:
        """Record a parameter set of the container: its kind, its number within the kind, and all its bytes."""
        self._of_container[kind, number] = content.rstrip(b"\0")  # zeros behind a NAL unit do not belong to it

    def begin_packet(self) -> None:
        """Begin the next packet: sets that are recorded from here on are in it."""
        self._here = set()

    def in_packet(self, kind: int, number: int, content: bytes) -> None:
        """Record a parameter set of a packet."""
        self._here.add((kind, number))
        if self._of_container.get((kind, number)) != content.rstrip(b"\0"):
            self._in_packets.add((kind, number))

    @property
    def complete(self) -> bool:
        """Return whether decoding may begin at this packet, as far as parameters are concerned."""
        return self._in_packets <= self._here

    @property
    def needed_later(self) -> bool:
        """Return whether the packet carries parameters that later packets may need."""
        return bool(self._in_packets & self._here)
