"""What a packet's headers say."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PacketFacts(NamedTuple):
    """Of one packet.

    Attributes:
        start: decoding may begin here, see `PacketFlag.START`.
        droppable: no frame of the same or a lower layer needs its frame.
        layer: temporal layer; only what is droppable in the highest one is needed by nobody.
        irregular: it does not hold exactly one frame, or changes the stream's parameters.
    """

    start: bool = False
    droppable: bool = False
    layer: int = 0
    irregular: bool = False


class PacketReader(Protocol):
    """Reads the packets of one stream, in decode order."""

    def read(self, data: bytes, key: bool) -> PacketFacts:
        """Facts of the next packet; ``key`` is what the container says of it.

        Raises:
            EndOfBits: its headers are cut off.
        """


class ParameterSets:
    """Tells when a stream's parameters change: a decoder that begins in the middle would not know of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bytes] = {}

    def changed_by(self, kind: int, number: int, content: bytes, *, first: bool) -> bool:
        """Whether this parameter set is another than the one with its number before.

        Args:
            kind: of parameter set.
            number: its own within its kind.
            content: all its bytes.
            first: it comes before all frames, so that no frame can have used another.
        """
        content = content.rstrip(b"\0")  # zeros after a NAL unit belong to the byte stream
        known = self._known.get((kind, number))
        if known is None or first:
            self._known[kind, number] = content
            return not first
        return known != content
