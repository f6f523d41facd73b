"""Conversion of packets for NVDEC's parser: start codes in place of lengths, parameter sets in the stream.

ISO/IEC 14496-15 (the configuration records of AVC and HEVC), 14496-10 annex B and 7.3.2.1.1 (start codes, the sequence
parameter set), 23008-2 7.3.3 (profile and tier), and AV1-ISOBMFF (av1C).
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_omni_sched.video.bitstream.bits import Bits, EndOfBits, skip_scaling_list, unescaped

START_CODE = b"\x00\x00\x00\x01"
_SPS = 7
_WITH_CHROMA = {
    100,
    110,
    122,
    244,
    44,
    83,
    86,
    118,
    128,
    138,
    139,
    134,
    135,
}  # profiles whose parameters include the chroma format


class Framing(NamedTuple):
    """The conversion of a stream's packets for a parser.

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
        body = bytes(data) if not self.length_bytes else _with_start_codes(data, self.length_bytes)
        return self.head + body if begins else body


def framing(codec: str, extradata: bytes) -> Framing:
    """Return the framing of a stream, from FFmpeg's name of its codec and the parameters of its container.

    Raises:
        ValueError: the parameters are truncated.
    """
    try:
        if codec == "h264":
            return _avc(extradata)
        if codec == "hevc":
            return _hevc(extradata)
    except (IndexError, EndOfBits):
        raise ValueError(f"the parameters of the {codec} stream are truncated") from None
    return Framing(0, extradata[4:] if codec == "av1" and extradata[:1] == b"\x81" else b"")


def _avc(extradata: bytes) -> Framing:
    if extradata[:1] != b"\x01":  # none, or start codes already
        units = [unit for unit in extradata.split(b"\x00\x00\x01") if unit]
        return Framing(0, extradata, _any_fields(units))
    units, at = [], 5
    for mask in (0x1F, 0xFF):  # sequence parameter sets, then picture parameter sets
        count, at = extradata[at] & mask, at + 1
        for _ in range(count):
            unit, at = _unit(extradata, at)
            units.append(unit)
    return Framing((extradata[4] & 3) + 1, _joined(units), _any_fields(units))


def _hevc(extradata: bytes) -> Framing:
    if extradata[:1] != b"\x01":
        return Framing(0, extradata)
    units, at = [], 23
    for _ in range(extradata[22]):
        count, at = _short(extradata, at + 1), at + 3
        for _ in range(count):
            unit, at = _unit(extradata, at)
            units.append(unit)
    return Framing((extradata[21] & 3) + 1, _joined(units), bool(extradata[6] & 0x40))


def _short(data: bytes, at: int) -> int:
    return data[at] << 8 | data[at + 1]


def _unit(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 2 + _short(data, at)
    if end > len(data):
        raise IndexError
    return data[at + 2 : end], end


def _joined(units: list[bytes]) -> bytes:
    return b"".join(START_CODE + unit for unit in units)


def _with_start_codes(data: memoryview | bytes, length_bytes: int) -> bytes:
    parts, at = [], 0
    while at + length_bytes < len(data):
        end = at + length_bytes + int.from_bytes(data[at : at + length_bytes], "big")
        parts += [START_CODE, bytes(data[at + length_bytes : end])]
        at = end
    return b"".join(parts)


def _any_fields(units: list[bytes]) -> bool:
    return any(_may_hold_fields(unit) for unit in units if unit[0] & 0x1F == _SPS)


def _may_hold_fields(sps: bytes) -> bool:
    """Return the negation of ``frame_mbs_only_flag``; reads all fields before it."""
    bits = Bits(unescaped(sps, len(sps))[1:])
    profile = bits.read(8)
    bits.read(16)  # constraints, level
    bits.ue()  # its number
    if profile in _WITH_CHROMA:
        chroma = bits.ue()
        if chroma == 3:
            bits.read(1)
        bits.ue()
        bits.ue()
        bits.read(1)
        if bits.read(1):
            for i in range(12 if chroma == 3 else 8):
                if bits.read(1):
                    skip_scaling_list(bits, 16 if i < 6 else 64)
    bits.ue()
    order = bits.ue()
    if order == 0:
        bits.ue()
    elif order == 1:
        bits.read(1)
        bits.se()
        bits.se()
        for _ in range(bits.ue()):
            bits.se()
    bits.ue()
    bits.read(1)
    bits.ue()
    bits.ue()
    return not bits.read(1)
