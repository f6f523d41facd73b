"""Conversion from NV12 to RGB on the device, with the integer arithmetic of swscale.

swscale's vector code for x86 converts 8-bit 4:2:0 to RGB of the same size in 16 bits: samples times eight, minus their
offset, times a coefficient of 13 bits, of which the upper half is kept; each chroma sample serves four pixels.
Repeating this with integers gives the same result to the bit (tests compare them on random samples). As in `convert`,
the matrix and the range are those that the frame itself names, as OpenCV uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

_LUMA = 76309  # 255 / 219 in 16.16 fixed point
_BT601 = (104597, 132201, 25675, 53279)
_CHROMA = {
    1: (117489, 138438, 13975, 34925),  # BT.709
    2: _BT601,  # unspecified
    4: (104448, 132798, 24759, 53109),  # FCC
    5: _BT601,
    6: _BT601,
    7: (117579, 136230, 16907, 35559),  # SMPTE 240M
    9: (110013, 140363, 12277, 42626),  # BT.2020, luminance not constant
}
"""Factors of V for red, U for blue, U and V for green, by H.273's number of the matrix, as in libswscale/yuv2rgb.c."""

SPACES = frozenset(_CHROMA)


class Colours(NamedTuple):
    """The meaning of a frame's samples: H.273's number of the matrix; whether luma spans 0 to 255, not 16 to 235."""

    space: int = 2
    full_range: bool = False


class Coefficients(NamedTuple):
    """Coefficients with 13 fractional bits; ``black`` is the luma value of black."""

    luma: int
    v_red: int
    u_blue: int
    u_green: int
    v_green: int
    black: int


def coefficients(colours: Colours) -> Coefficients:
    """Return the coefficients of a matrix in `SPACES`."""
    full = colours.full_range
    red, blue, green_u, green_v = (c * 224 // 255 if full else c for c in _CHROMA[colours.space])
    return Coefficients(
        _13_bits(1 << 16 if full else _LUMA),
        _13_bits(red),
        _13_bits(blue),
        _13_bits(-green_u),
        _13_bits(-green_v),
        0 if full else 16,
    )


def _13_bits(value: int) -> int:
    return (value * (1 << 13) + (1 << 15)) >> 16


def nv12_to_rgb(frame: torch.Tensor, colours: Colours) -> torch.Tensor:
    """Convert a decoded frame to RGB.

    Args:
        frame: uint8 of shape (3 * height / 2, width), height and width even: rows of luma, then of U and V in turn.
        colours: meaning of the frame's samples.

    Returns:
        The frame as uint8 of shape (height, width, 3), on the same device.
    """
    import torch

    c = coefficients(colours)
    height, width = frame.shape[0] * 2 // 3, frame.shape[1]
    luma = frame[:height].int().sub_(c.black).mul_(8 * c.luma) >> 16
    chroma = frame[height:].reshape(height // 2, width // 2, 2).int().sub_(128).mul_(8)
    u, v = chroma[..., 0], chroma[..., 1]
    add = torch.stack(
        [(v * c.v_red) >> 16, ((u * c.u_green) >> 16) + ((v * c.v_green) >> 16), (u * c.u_blue) >> 16], dim=-1
    )
    blocks = luma.reshape(height // 2, 2, width // 2, 2, 1) + add[:, None, :, None, :]
    return blocks.clamp_(0, 255).to(torch.uint8).reshape(height, width, 3)
