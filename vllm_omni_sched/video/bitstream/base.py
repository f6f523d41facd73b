"""What a packet's headers say."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PacketFacts(NamedTuple):
    """Of one packet.

    Attributes:
        start: decoding may begin here, see `PacketFlag.START`.
        droppable: no frame of the same or a lower layer needs its frame.
        layer: temporal layer; only what is droppable in the highest one is needed by nobody.
        irregular: it does not hold exactly one frame.
        display: rank of its frame in the order in which a decoder puts frames out; of equal ranks the one that is
            decoded first comes first. None: the headers that were read do not tell.
    """

    start: bool = False
    droppable: bool = False
    layer: int = 0
    irregular: bool = False
    display: int | None = None


class PacketReader(Protocol):
    """Reads the packets of one stream, in decode order."""

    def read(self, data: bytes, key: bool) -> PacketFacts:
        """Facts of the next packet; ``key`` is what the container says of it.

        Raises:
            EndOfBits: its headers are cut off.
        """


class PictureOrder:
    """Ranks of pictures whose headers hold the low bits of a count that begins anew, as in H.264 and HEVC.

    Counts are less than 2^31 apart, so that those of one sequence come before all of the next.
    """

    def __init__(self) -> None:
        self._sequence = self._high = self._low = 0

    def begin(self) -> None:
        """Begin a sequence: its counts start from 0, and its pictures come behind all before them."""
        self._sequence += 1
        self._high = self._low = 0

    def rank(self, low: int, bits: int, *, counts: bool) -> int:
        """Rank of the next picture (H.264 8.2.1.1, HEVC 8.3.1).

        Args:
            low: bits of its count.
            bits: how many these are.
            counts: later ones are counted from it.
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
    """Whether a decoder that begins at a packet knows the stream's parameters as they are there.

    It knows those of the container. Those that came in packets, and are not the container's, it knows only when the
    packet at which it begins carries them again.
    """

    def __init__(self) -> None:
        self._of_container: dict[tuple[int, int], bytes] = {}
        self._in_packets: set[tuple[int, int]] = set()
        self._here: set[tuple[int, int]] = set()

    def of_container(self, kind: int, number: int, content: bytes) -> None:
        """Note a parameter set of the container: of what kind, its number within that, all its bytes."""
        self._of_container[kind, number] = content.rstrip(b"\0")  # zeros behind a NAL unit are not of it

    def begin_packet(self) -> None:
        """What is noted from here on is in the next packet."""
        self._here = set()

    def in_packet(self, kind: int, number: int, content: bytes) -> None:
        """Note a parameter set of a packet."""
        self._here.add((kind, number))
        if self._of_container.get((kind, number)) != content.rstrip(b"\0"):
            self._in_packets.add((kind, number))

    @property
    def complete(self) -> bool:
        """Decoding may begin at this packet, as far as parameters go."""
        return self._in_packets <= self._here

    @property
    def needed_later(self) -> bool:
        """The packet carries parameters that those after it may need."""
        return bool(self._in_packets & self._here)
