"""The video loader: one of vLLM's own loaders, with only its decoding replaced.

A rule (a loader class) decodes by ``decode_opencv``. That function is wrapped: on a thread on which our loader runs a
rule, it is ours. vLLM 0.22 has no such function: see `capture_loader`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.engine.video import service as process_service
from vllm_omni_sched.engine.video.capture_loader import load_by_capture
from vllm_omni_sched.engine.video.rules import (
    CLASSES,
    NAME,
    StockReason,
    default_rule,
    reads_itself,
    rule_named,
    wanted_of,
)
from vllm_omni_sched.engine.video.source import frame_size, source_of
from vllm_omni_sched.graph.order import INTERACTIVE, SlaClass
from vllm_omni_sched.imports import wrap_once
from vllm_omni_sched.logs import get_logger

if TYPE_CHECKING:
    from vllm_omni_sched.video.facts import VideoIndex
    from vllm_omni_sched.video.service import FlashCodec

logger = get_logger(__name__)


Decode = Callable[..., Any]
"""The signature of vLLM's ``decode_opencv``: (rule, data, target, sampling_kwargs, frame_recovery=) to
(frames, source, indices wanted, indices found)."""

_thread = threading.local()  # `.decode`: replaces decode_opencv on this thread


class FlashCodecLoader:
    """The loader that vLLM knows as ``omni_flashcodec``; vLLM creates one for every video.

    Args:
        service: decodes the videos; None for the service of this process.
    """

    def __init__(self, service: FlashCodec | None = None) -> None:
        self._service = service

    def load_bytes(
        self, data: bytes, *, sampling: str | None = None, omni_class: str = INTERACTIVE.name, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the sampled frames, uint8 RGB of shape (frames, height, width, 3), and the metadata for vLLM's
        processors.

        Args:
            data: a video file.
            sampling: the rule, by its name among vLLM's loaders; None for the default one. When the operator chooses
                our loader, the model's own rule is filled in.
            omni_class: realtime, interactive or batch; videos of the earlier classes are decoded first.
            kwargs: arguments of the rule, such as ``num_frames`` and ``fps``.

        Raises:
            RequestError: there is no such rule or class, another decoder is named, or this server was started without
                our loader.
            VideoInputError: the video cannot be read, or is larger than the options allow.
            VideoDeadlineError: it was not decoded in time.
            DecoderError: no decoder process is left.
            ValueError: raised by the rule.
        """
        rule = rule_named(sampling or default_rule())
        _check_decoder(kwargs)
        sla = _class(omni_class)
        service = self._service or process_service.get()
        found: tuple[Any, dict[str, Any]]
        if not replace_decoding():
            return load_by_capture(rule, data, service, sla, kwargs)
        stock_reasons: list[StockReason | None] = []
        with _decode_opencv_replaced_by(functools.partial(_decode, service, sla, stock_reasons)):
            found = rule.load_bytes(data, **kwargs)
        reason = stock_reasons[-1] if stock_reasons else StockReason.OWN_DECODING
        if reason is not None:
            process_service.observe_stock(reason)
        return found


def _check_decoder(kwargs: dict[str, Any]) -> None:
    for name, own in (("backend", "opencv"), ("device", "cpu")):
        if kwargs.get(name, own) not in (None, own):
            raise RequestError(
                f"{name} is {kwargs[name]!r}, and this server decodes videos by {NAME!r} alone: leave {name!r} out"
            )


def _class(name: str) -> SlaClass:
    """Return the class of that name.

    Raises:
        RequestError: there is no such class, or the operator does not allow requests to name it.
    """
    known = list(CLASSES)
    if name not in known:
        raise RequestError(f"omni_class is {name!r}; it must be one of {known}")
    allowed = known[known.index(process_service.most_urgent_class()) :]
    if name not in allowed:
        raise RequestError(f"omni_class is {name!r}; on this server a request may name one of {allowed}")
    return CLASSES[name]


def _decode(
    service: FlashCodec,
    sla: SlaClass,
    stock_reasons: list[StockReason | None],
    rule: Any,
    data: bytes,
    target: Any,
    sampling_kwargs: dict[str, Any],
    *,
    frame_recovery: bool = False,
) -> Any:
    if reads_itself(rule):
        stock_reasons.append(StockReason.OWN_READER)
        return NotImplemented
    stock_reasons.append(None)
    vllm_decoders = import_module("vllm.multimodal.video_decoders.base")
    sampled: list[Any] = []

    def choose(index: VideoIndex) -> list[int]:
        vllm_decoders.check_frame_pixel_limit(*frame_size(index))
        described = source_of(index)
        metadata = vllm_decoders.VideoSourceMetadata(described.total_frames, described.fps, described.duration_seconds)
        source = rule._prepare_source(metadata)
        frames = rule.compute_frames_index_to_sample(source=source, target=target, **sampling_kwargs)
        sampled[:] = [source, frames]
        return wanted_of(frames)

    decoded = service.load(data, choose, sla=sla, recovery=frame_recovery)
    process_service.observe_missing(len(set(sampled[1])) - len(decoded.indices))
    return decoded.frames, *sampled, decoded.indices


@contextmanager
def _decode_opencv_replaced_by(decode: Decode) -> Iterator[None]:
    _thread.decode = decode
    try:
        yield
    finally:
        _thread.decode = None


def replace_decoding() -> bool:
    """Wrap ``decode_opencv`` so that ours can replace it; return False if this vLLM has no such function.
    Idempotent.
    """
    try:
        module = import_module(compat.VIDEO_OPENCV)
    except ImportError:
        return False
    wrap_once(module, "decode_opencv", _replaceable)
    return True


def _replaceable(stock: Callable[..., Any]) -> Callable[..., Any]:
    def decode_opencv(*args: Any, **kwargs: Any) -> Any:
        decode = getattr(_thread, "decode", None)
        if decode is not None and (decoded := decode(*args, **kwargs)) is not NotImplemented:
            return decoded
        return stock(*args, **kwargs)

    return decode_opencv
