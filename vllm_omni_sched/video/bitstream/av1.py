"""AV1 (its bitstream specification, version 1.0.0 with errata 1): key frames that are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm_omni_sched.video.bitstream.base import PacketFacts, ParameterSets
from vllm_omni_sched.video.bitstream.bits import Bits, EndOfBits

_SEQUENCE_HEADER, _FRAME_HEADER, _FRAME = 1, 3, 6
_KEY_FRAME = 0


class Av1Reader:
    """Reads temporal units of AV1.

    A start is a unit that begins with a key frame shown at once. A key frame that is shown later, by reference,
    is none: frames before it in display order come after it in the file.
    """

    def __init__(self, extradata: bytes) -> None:
        self._sets = ParameterSets()
        self._still = False
        for kind, content in obus(extradata[4:]):  # behind the head of av1C
            if kind == _SEQUENCE_HEADER:
                self._sequence_header(content, self._sets.of_container)

    def read(self, data: bytes, key: bool) -> PacketFacts:
        """See `PacketReader.read`."""
        self._sets.begin_packet()
        start = False
        frames = shown = 0
        for kind, content in obus(data):
            if kind == _SEQUENCE_HEADER:
                self._sequence_header(content, self._sets.in_packet)
            elif kind in (_FRAME, _FRAME_HEADER):
                is_key, is_shown = self._header(content)
                start |= frames == 0 and is_key and is_shown and self._sets.complete
                frames += 1
                shown += is_shown
        return PacketFacts(start=start, irregular=shown != 1)

    def _sequence_header(self, content: bytes, note: Callable[[int, int, bytes], None]) -> None:
        self._still = bool(Bits(content[:1]).read(5) & 1)  # profile, still picture, reduced header
        note(_SEQUENCE_HEADER, 0, content)

    def _header(self, content: bytes) -> tuple[bool, bool]:
        """Whether it is a key frame, whether it is shown."""
        if self._still:
            return True, True
        bits = Bits(content[:2])
        if bits.flag():  # show_existing_frame
            return False, True
        return bits.read(2) == _KEY_FRAME, bits.flag()


def obus(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Open bitstream units: type and content."""
    at = 0
    while at < len(data):
        head = data[at]
        at += 2 if head & 4 else 1
        if head & 2:  # has a size
            size = shift = 0
            while True:
                if at >= len(data) or shift > 28:
                    raise EndOfBits
                byte = data[at]
                at += 1
                size |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
        else:
            size = len(data) - at
        yield head >> 3 & 15, data[at : at + size]
        at += size
