"""Bits of a parameter set, as H.264 writes them."""

from __future__ import annotations

_MAX_ZEROS = 32  # before a number; more is no number


class Bits:
    """Read from the front. Reading beyond the end raises IndexError."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, count: int) -> int:
        """So many bits, the first one highest."""
        value = 0
        for at in range(self._at, self._at + count):
            value = value << 1 | self._data[at >> 3] >> (7 - (at & 7)) & 1
        self._at += count
        return value

    def unsigned(self) -> int:
        """ue(v): an Exp-Golomb number."""
        zeros = 0
        while not self.read(1):
            zeros += 1
            if zeros > _MAX_ZEROS:
                raise IndexError
        return (1 << zeros) - 1 + self.read(zeros)

    def signed(self) -> int:
        """se(v): 0, 1, -1, 2, -2, …"""
        number = self.unsigned()
        return (number + 1) // 2 if number % 2 else -(number // 2)


def unescaped(unit: bytes) -> bytes:
    """Without the bytes that keep start codes out of a unit."""
    return unit.replace(b"\x00\x00\x03", b"\x00\x00")
