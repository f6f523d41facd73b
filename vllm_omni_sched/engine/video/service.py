"""The decoding service of this process: one for all its videos, created with the first one, closed at exit."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING

from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.engine.video.rules import NAME, StockReason
from vllm_omni_sched.graph.order import INTERACTIVE
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.video.on_device import FramesReason
from vllm_omni_sched.video.options import VideoOptions

if TYPE_CHECKING:
    from vllm_omni_sched.engine.video.metrics import VideoMetrics
    from vllm_omni_sched.video.service import FlashCodec

logger = get_logger(__name__)

_lock = threading.Lock()
_options = VideoOptions()
_refused = False
_most_urgent_class = INTERACTIVE.name
_place, _device = FramesReason.OFF, 0
_service: FlashCodec | None = None
_metrics: VideoMetrics | None = None
_logged: set[StockReason] = set()


def configure(
    options: VideoOptions,
    most_urgent: str = INTERACTIVE.name,
    place: FramesReason = FramesReason.OFF,
    device: int = 0,
) -> None:
    """Set the options for videos of this process, from the next one on; a running service is closed.

    Args:
        most_urgent: the most urgent class that requests may name.
        place: whether frames stay on a device, or why not.
        device: number of that device.
    """
    global _options, _refused, _most_urgent_class, _place, _device
    close()
    with _lock:
        _options, _refused, _most_urgent_class = options, False, most_urgent
        _place, _device = place, device


def most_urgent_class() -> str:
    """Return the most urgent class that requests may name."""
    return _most_urgent_class


def refuse() -> None:
    """Refuse our loader to requests of this process, because the operator of its engine has not chosen it."""
    global _refused
    with _lock:
        _refused = _service is None


def get() -> FlashCodec:
    """Return the service of this process; start it if it is not running.

    Raises:
        RequestError: the operator has not chosen our loader.
    """
    global _service
    with _lock:
        if _refused:
            raise RequestError(
                f"video_backend is {NAME!r}, but this server was not started with it: leave it out, or start it with "
                f'--media-io-kwargs \'{{"video": {{"video_backend": "{NAME}"}}}}\''
            )
        if _service is not None and not _service.alive:
            logger.error(
                "%s: the decoding service ended by itself, which is a bug; the videos that it was decoding failed, and "
                "it is restarted for further ones",
                NAME,
            )
            _metrics_of_process().renewed()
            dead, _service = _service, None
            _close(dead)
        if _service is None:
            from vllm_omni_sched.video.service import FlashCodec

            _service = FlashCodec(_options, observer=_metrics_of_process(), place=_place, device=_device)
            _service.start()
        return _service


def close() -> None:
    """Close the service, if it runs. Videos in flight end with an error."""
    global _service
    with _lock:
        closing, _service = _service, None
        if closing is not None:
            _close(closing)


def _close(service: FlashCodec) -> None:
    service.close()
    _metrics_of_process().busy(0, 0)


def observe_stock(reason: StockReason) -> None:
    """Count a video that was decoded by vLLM's own code, and log the first one for each reason."""
    with _lock:
        _metrics_of_process().fell_back(reason.value)
        if reason not in _logged:
            _logged.add(reason)
            logger.warning(
                "%s: a video was decoded by vLLM's own code, which is slower and not sandboxed; reason: %s. Further "
                "ones are counted in the metric video_fallbacks_total.",
                NAME,
                reason.value,
            )


def observe_missing(frames: int) -> None:
    """Count requested frames of a video that could not be decoded soundly."""
    with _lock:
        _metrics_of_process().missed(frames)


def _metrics_of_process() -> VideoMetrics:
    global _metrics
    if _metrics is None:
        from vllm_omni_sched.engine.video.metrics import VideoMetrics

        _metrics = VideoMetrics()
        _metrics.attach()
    return _metrics


def _reset_after_fork() -> None:
    """Reset the state in a forked child: the service belongs to the parent, and so may the holder of the lock."""
    global _service, _lock
    _service, _lock = None, threading.Lock()


atexit.register(close)
os.register_at_fork(after_in_child=_reset_after_fork)
