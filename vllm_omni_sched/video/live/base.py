"""What comes out of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class LiveFrame(NamedTuple):
    """A frame that has arrived.

    Attributes:
        number: in display order, from 0, counting those that the sampling rule left out.
        pts_seconds: when it is shown, from the first frame.
        pixels: uint8 of shape (height, width, 3), RGB, read-only, in shared memory. It holds a slot of the ring until
            it goes: copy what is to be kept.
    """

    number: int
    pts_seconds: float
    pixels: npt.NDArray[np.uint8]


class Counts(NamedTuple):
    """Of frames: ``arrived`` so far; the others are known when the stream has ended, and 0 before.

    ``dropped``: wanted, and left out because nobody had taken those before. ``damaged``: packets that could not be
    decoded, and a container that broke off.
    """

    decoded: int
    arrived: int
    dropped: int
    damaged: int
