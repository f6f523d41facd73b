"""From NV12 to RGB on the device, with the integers of swscale.

swscale's vector code for x86 converts 8-bit 4:2:0 to RGB of the same size in 16 bits: samples times eight, less their
offset, times a coefficient of 13 bits, of which the upper half is kept; each chroma sample serves four pixels. Done
over with integers here, the result is the same to the bit (tests compare them over random samples). Like OpenCV, and
unlike a player, it takes BT.601 for every video, whatever its header says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# BT.601 in 16.16 fixed point, as in libswscale/yuv2rgb.c: luma 255/219, V to red, U to blue, U and V to green
_LUMA, _V_RED, _U_BLUE, _U_GREEN, _V_GREEN = 76309, 104597, 132201, -25675, -53279


class Coefficients(NamedTuple):
    """With 13 bits behind the point; ``black`` is the luma of it."""

    luma: int
    v_red: int
    u_blue: int
    u_green: int
    v_green: int
    black: int


def coefficients(full_range: bool) -> Coefficients:
    """Of BT.601."""
    chroma = [_V_RED, _U_BLUE, _U_GREEN, _V_GREEN]
    if full_range:
        chroma = [abs(c) * 224 // 255 * (1 if c > 0 else -1) for c in chroma]
    luma, *rest = ((c * (1 << 13) + (1 << 15)) >> 16 for c in [1 << 16 if full_range else _LUMA, *chroma])
    v_red, u_blue, u_green, v_green = rest
    return Coefficients(luma, v_red, u_blue, u_green, v_green, 0 if full_range else 16)


def nv12_to_rgb(frame: torch.Tensor, full_range: bool) -> torch.Tensor:
    """A frame as decoders leave it, in RGB.

    Args:
        frame: uint8 of shape (3 * height / 2, width), height and width even: rows of luma, then of U and V in turn.
        full_range: luma spans 0 to 255.

    Returns:
        uint8 of shape (height, width, 3), on the same device.
    """
    import torch

    c = coefficients(full_range)
    height, width = frame.shape[0] * 2 // 3, frame.shape[1]
    luma = frame[:height].int().sub_(c.black).mul_(8 * c.luma) >> 16
    chroma = frame[height:].reshape(height // 2, width // 2, 2).int().sub_(128).mul_(8)
    u, v = chroma[..., 0], chroma[..., 1]
    add = torch.stack(
        [(v * c.v_red) >> 16, ((u * c.u_green) >> 16) + ((v * c.v_green) >> 16), (u * c.u_blue) >> 16], dim=-1
    )
    blocks = luma.reshape(height // 2, 2, width // 2, 2, 1) + add[:, None, :, None, :]
    return blocks.clamp_(0, 255).to(torch.uint8).reshape(height, width, 3)
