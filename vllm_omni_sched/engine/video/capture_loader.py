"""Load videos under a vLLM without ``decode_opencv``: its rules open a capture, ask for facts, and read its frames.

All three go through the rule's class. A subclass made for one video opens a `_Capture`, which answers from our index,
and reads our frames. The frames have to be known before they are decoded, so the rule runs twice: the first run is
stopped when it names its frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.engine.video import service as process_service
from vllm_omni_sched.engine.video.rules import StockReason, reads_itself, wanted_of
from vllm_omni_sched.engine.video.source import Source, frame_size, source_of

if TYPE_CHECKING:
    from vllm_omni_sched.graph.order import SlaClass
    from vllm_omni_sched.video.facts import VideoIndex
    from vllm_omni_sched.video.service import FlashCodec

_WIDTH, _HEIGHT, _FPS, _FRAME_COUNT = 3, 4, 5, 7  # OpenCV's CAP_PROP_…


class _Capture:
    """Answers for a video as an OpenCV capture does before its first frame."""

    def __init__(self, index: VideoIndex, source: Source) -> None:
        width, height = frame_size(index)
        self._facts = {_WIDTH: width, _HEIGHT: height, _FPS: source.fps, _FRAME_COUNT: source.total_frames}

    def get(self, fact: int) -> float:
        return float(self._facts[fact])


class _FramesNamed(Exception):
    """Stops the first run of a rule once it has named its frames."""

    def __init__(self, frames: Sequence[int]) -> None:
        super().__init__()
        self.frames = frames


class _FramesNeverNamed(Exception):
    """Ends `load_by_capture` when the first run of a rule has not named any frames."""


def load_by_capture(
    rule: Any, data: bytes, service: FlashCodec, sla: SlaClass, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Load a video by a rule of vLLM 0.22; otherwise as `FlashCodecLoader.load_bytes`."""
    found: tuple[Any, dict[str, Any]]
    opened: list[_Capture] = []

    def choose(index: VideoIndex) -> list[int]:
        source = source_of(index, cross_check=False)
        opened.append(_Capture(index, source))
        try:
            _variant(rule, opened[0], _stop).load_bytes(data, **kwargs)
        except _FramesNamed as named:
            return wanted_of(named.frames)
        raise _FramesNeverNamed

    reason = None
    if not hasattr(rule, "open_video_capture"):
        reason = StockReason.OWN_DECODING
    elif reads_itself(rule):
        reason = StockReason.OWN_READER
    else:
        try:
            decoded = service.load(data, choose, sla=sla, recovery=bool(kwargs.get("frame_recovery", False)))
        except _FramesNeverNamed:
            reason = StockReason.OWN_DECODING
    if reason is not None:
        process_service.observe_stock(reason)
        found = rule.load_bytes(data, **kwargs)
    else:
        found = _variant(rule, opened[0], lambda *_, **__: (decoded.frames, decoded.indices)).load_bytes(data, **kwargs)
    return found


def _stop(_cls: Any, _capture: _Capture, frames: Sequence[int], *_: Any, **__: Any) -> Any:
    raise _FramesNamed(frames)


def _variant(rule: Any, capture: _Capture, read: Callable[..., Any]) -> Any:
    """Return a subclass of the rule with another capture and another reader."""
    methods = {
        "open_video_capture": classmethod(lambda _cls, _data: capture),
        "read_frames": classmethod(read),
    }
    return type(rule.__name__, (rule,), methods)
