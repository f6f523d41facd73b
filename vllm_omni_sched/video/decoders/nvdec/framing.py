"""Conversion of packets for NVDEC's parser: start codes in place of lengths, parameter sets in the stream.

ISO/IEC 14496-15 (the configuration records of AVC and HEVC), 14496-10 annex B (start codes), 23008-2 7.3.3 (profile and
tier), and AV1-ISOBMFF (av1C).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vllm_omni_sched.video.bitstream import h264, hevc
from vllm_omni_sched.video.bitstream.bits import EndOfBits

START_CODE = b"\x00\x00\x00\x01"


class Framing(NamedTuple):
    """Converts a stream's packets for a parser.

    Attributes:
        length_bytes: size of the length before each unit; 0 if packets need no conversion.
        head: bytes to put before a packet where decoding begins.
        interlaced: whether the stream may hold fields.
    """

    length_bytes: int
    head: bytes
    interlaced: bool = False

    def packet(self, data: memoryview | bytes, begins: bool) -> bytes:
        """Return one converted packet; truncated units end where the packet ends."""
        body = _with_start_codes(_units(data, self.length_bytes)) if self.length_bytes else bytes(data)
        return self.head + body if begins else body


def framing(codec: str, extradata: bytes) -> Framing:
    """Return the framing of a stream, from FFmpeg's name of its codec and the parameters of its container.

    Raises:
        ValueError: the parameters are truncated.
    """
    try:
        if codec == "h264":
            length_bytes, units = h264.parameter_sets(extradata)
            fields = any(h264.read_sequence(unit)[1].fields for unit in units if unit[0] & 31 == h264.SPS)
            return Framing(length_bytes, _with_start_codes(units) if length_bytes else extradata, fields)
        if codec == "hevc":
            length_bytes, units = hevc.parameter_sets(extradata)
            head = _with_start_codes(units) if length_bytes else extradata
            return Framing(length_bytes, head, hevc.may_hold_fields(extradata))
    except (IndexError, EndOfBits):
        raise ValueError(f"the parameters of the {codec} stream are truncated") from None
    return Framing(0, extradata[4:] if codec == "av1" and extradata[:1] == b"\x81" else b"")


def _with_start_codes(units: Iterable[bytes]) -> bytes:
    return b"".join(START_CODE + unit for unit in units)


def _units(data: memoryview | bytes, length_bytes: int) -> Iterator[bytes]:
    at = 0
    while at + length_bytes < len(data):
        end = at + length_bytes + int.from_bytes(data[at : at + length_bytes], "big")
        yield bytes(data[at + length_bytes : end])
        at = end
