"""What both loaders need of decoding: the service that decodes, and the frames to ask it for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm_omni_sched.errors import VideoInputError
from vllm_omni_sched.graph.order import INTERACTIVE, SlaClass

if TYPE_CHECKING:
    from vllm_omni_sched.video.base import Decoded
    from vllm_omni_sched.video.facts import VideoIndex
    from vllm_omni_sched.video.options import VideoOptions


class Service(Protocol):
    """The part of `vllm_omni_sched.video.service.FlashCodec` that the loader needs."""

    options: VideoOptions

    def load(
        self,
        data: bytes,
        choose: Callable[[VideoIndex], Sequence[int]],
        *,
        sla: SlaClass = INTERACTIVE,
        recovery: bool = False,
    ) -> Decoded: ...


def wanted_of(frames: Sequence[int]) -> list[int]:
    """Return the frames to decode: each once, in display order, as vLLM's loader reads them.

    Raises:
        VideoInputError: the rule wants none.
    """
    wanted = sorted({int(frame) for frame in frames if frame >= 0})
    if not wanted:
        raise VideoInputError("the sampling rule finds no frame in this video: is it empty?")
    return wanted
