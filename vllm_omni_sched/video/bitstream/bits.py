"""Reading of headers: bits, Exp-Golomb numbers, NAL units."""

from __future__ import annotations

from collections.abc import Iterator

HEADER_BYTES = 96
"""Bytes of a NAL unit that suffice for the read part of a slice header, and for most parameter sets."""

UNIT_BYTES = 4096
"""Bytes read of a NAL unit: more than parameter sets have. Slices are longer, but only their headers matter."""


class EndOfBits(Exception):
    """A header is shorter than it claims: the packet is damaged, or of another format."""


class Bits:
    """Reads the bits of ``data``, most significant first; ``left`` is the number of remaining bits.

    Raises:
        EndOfBits: on reading past the end.
    """

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "big")
        self.left = len(data) * 8

    def read(self, count: int) -> int:
        """Return the next ``count`` bits as an unsigned number."""
        self.left -= count
        if self.left < 0:
            raise EndOfBits
        return (self._value >> self.left) & ((1 << count) - 1)

    def flag(self) -> bool:
        """Return the next bit."""
        return self.read(1) == 1

    def ue(self) -> int:
        """Return the next unsigned Exp-Golomb number."""
        rest = self._value & ((1 << self.left) - 1)
        zeros = self.left - rest.bit_length()
        if zeros > 32:
            raise EndOfBits
        return self.read(2 * zeros + 1) - 1

    def se(self) -> int:
        """Return the next signed Exp-Golomb number."""
        value = self.ue()
        return (value + 1) // 2 if value & 1 else -(value // 2)


def unescaped(nal: bytes, limit: int = HEADER_BYTES) -> bytes:
    """Return the first bytes of a NAL unit without its emulation prevention bytes."""
    return nal[:limit].replace(b"\0\0\3", b"\0\0")


def nals(data: bytes, length_bytes: int) -> Iterator[bytes]:
    """Yield the NAL units of a packet, each cut to its first `UNIT_BYTES`.

    Args:
        data: the packet.
        length_bytes: size of the length before each unit, as in MP4; 0 for start codes, as in MPEG-TS.
    """
    return _by_length(data, length_bytes) if length_bytes else _by_start_code(data)


def _by_length(data: bytes, length_bytes: int) -> Iterator[bytes]:
    at = 0
    while at + length_bytes < len(data):
        begin = at + length_bytes
        at = begin + int.from_bytes(data[at:begin], "big")
        if at > begin:
            yield data[begin : min(at, begin + UNIT_BYTES)]


def _by_start_code(data: bytes) -> Iterator[bytes]:
    begin = data.find(b"\0\0\1")
    while begin >= 0:
        begin += 3
        end = data.find(b"\0\0\1", begin)
        nal = data[begin : min(end if end >= 0 else len(data), begin + UNIT_BYTES)]
        if nal:
            yield nal
        begin = end


def sized_units(record: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    """Return NAL units of a configuration record, each behind its length in 16 bits, and the offset behind them.

    Raises:
        EndOfBits: the record is truncated.
    """
    units = []
    for _ in range(count):
        begin = at + 2
        at = begin + int.from_bytes(record[at:begin], "big")
        if begin > len(record) or at > len(record):
            raise EndOfBits
        if at > begin:
            units.append(record[begin:at])
    return units, at


def skip_scaling_list(bits: Bits, size: int) -> None:
    """Skip a scaling list of ``size`` numbers of H.264 (7.3.2.1.1.1)."""
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.se()) % 256
        last = following or last
