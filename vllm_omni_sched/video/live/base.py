"""The results of decoding a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class LiveFrame(NamedTuple):
    """A decoded frame of a stream.

    Attributes:
        number: number in display order, from 0, counting frames that the sampling rule left out.
        pts_seconds: when it is shown, in seconds from the first frame.
        pixels: uint8 of shape (height, width, 3), RGB, read-only, in shared memory. The array holds a slot of the
            ring until it is dropped: copy frames that you keep.
    """

    number: int
    pts_seconds: float
    pixels: npt.NDArray[np.uint8]


class Counts(NamedTuple):
    """Counts of a stream; all except ``arrived`` are 0 until the stream has ended.

    Attributes:
        decoded: frames that were decoded.
        arrived: frames that have arrived so far.
        dropped: wanted frames that were left out, because all slots were in use.
        damaged: packets that could not be decoded, and truncations of the container.
    """

    decoded: int
    arrived: int
    dropped: int
    damaged: int
