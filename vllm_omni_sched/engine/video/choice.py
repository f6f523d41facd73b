"""The operator's choice of our video loader, by ``--media-io-kwargs`` or by ``VLLM_VIDEO_LOADER_BACKEND``.

Stock vLLM prefers the loader named in the arguments, then the model's own (by its video processor, or by its
configuration), then the variable. Our loader does not replace the model's: it decodes the frames which that one
samples. Therefore the choice, however made, becomes two arguments, our loader and the model's rule, and requests need
no more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from vllm_omni_sched import __version__, compat
from vllm_omni_sched.config.errors import ConfigError, RequestError
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.config.load import load_config, read_options, resolved
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.profiles import PROFILES
from vllm_omni_sched.engine.fitted import LOADER_VARIABLE, front_end_facts, video_arguments
from vllm_omni_sched.engine.named import names_our_scheduler
from vllm_omni_sched.engine.preprocess.start import preprocess_options
from vllm_omni_sched.engine.video import service
from vllm_omni_sched.engine.video.rules import (
    CLASSES,
    NAME,
    default_rule,
    rule_named,
    rule_of_model,
    video_processor_of,
)
from vllm_omni_sched.graph.order import INTERACTIVE
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.resource.engine.lane import LaneFacts
from vllm_omni_sched.resource.engine.profile import RUST, loader_obstacle
from vllm_omni_sched.video.on_device import WHAT_TO_DO, FramesReason, Server, of_server
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.kinds import NVDEC, decoder_kinds

logger = get_logger(__name__)

_DECODED_ELSEWHERE = ("backend", "device")  # arguments that name a decoder


def is_chosen(engine_args: Any) -> bool:
    """Return whether these arguments, or else the environment, name our loader, or a profile asks for it.

    A profile asks for it if the engine is started with our scheduler, and `loader_obstacle` has nothing against it.

    Raises:
        ConfigError: the options in `additional_config` are invalid, or the operator has chosen our loader under vLLM's
            front end in Rust.
    """
    if _names_ours(engine_args.media_io_kwargs):
        if compat.rust_front_end():
            raise ConfigError(
                f"video loader {NAME!r} cannot work here, because {RUST}: leave out 'video_backend' and "
                f"{LOADER_VARIABLE}, or unset VLLM_USE_RUST_FRONTEND"
            )
        return True
    if not names_our_scheduler(engine_args.scheduler_cls):
        return False
    if not isinstance(engine_args.additional_config, Mapping):
        return False  # vLLM refuses it
    if not PROFILES[load_config(engine_args.additional_config).profile].video_loader:
        return False
    return loader_obstacle(LaneFacts(), front_end_facts(engine_args.media_io_kwargs)) is None


def _names_ours(media_io_kwargs: Any) -> bool:
    """Return whether the operator has named our loader."""
    named = video_arguments(media_io_kwargs).get("video_backend") or os.environ.get(LOADER_VARIABLE)
    return bool(named == NAME)


@contextmanager
def without_our_loader(engine_args: Any) -> Iterator[None]:
    """Remove our loader's name while vLLM makes its config, so that a loader in the model's configuration is seen."""
    given = engine_args.media_io_kwargs
    video = {key: value for key, value in video_arguments(given).items() if key != "video_backend"}
    engine_args.media_io_kwargs = {**(given or {}), "video": video}
    try:
        yield
    finally:
        engine_args.media_io_kwargs = given


def set_up(vllm_config: Any, given: Mapping[str, Any]) -> None:
    """Serve this engine's videos by our loader: name it and the model's rule, and start the decoders.

    Args:
        vllm_config: as vLLM made it under `without_our_loader`.
        given: the operator's ``--media-io-kwargs``.

    Raises:
        ConfigError: an option is wrong, an argument names another decoder or no sampling rule, or PyAV is missing,
            and the operator has named our loader.
    """
    options = video_options(load_config(vllm_config.additional_config))
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return  # a text-only model
    if find_spec("av") is None:
        raise ConfigError(f"video loader {NAME!r} needs PyAV, which is not installed: {how_to_install('video')}")
    given_for_video = video_arguments(given)
    if given_for_video.get("backend", "opencv") != "opencv":
        raise ConfigError(
            f"--media-io-kwargs name {NAME!r} and the decoder {given_for_video['backend']!r}, which would decode in "
            "its place: leave out 'backend' or 'video_backend'"
        )
    most_urgent = given_for_video.get("omni_class", INTERACTIVE.name)
    if most_urgent not in CLASSES:
        raise ConfigError(f"--media-io-kwargs: omni_class is {most_urgent!r}; it must be one of {list(CLASSES)}")
    video = {
        key: value
        for key, value in video_arguments(multimodal.media_io_kwargs).items()
        if key in given_for_video or key not in _DECODED_ELSEWHERE
    }
    rule = video.pop("video_backend", None) or rule_of_model(vllm_config.model_config)
    video.setdefault("sampling", rule or default_rule())
    try:
        rule_named(video["sampling"])
    except RequestError as error:
        if _names_ours(given) or "sampling" in given_for_video:
            raise ConfigError(f"--media-io-kwargs: {error}") from None
        # A profile has chosen our loader, and that of this model decodes on a GPU: it is named, and stays in use.
        stock = {**video_arguments(multimodal.media_io_kwargs), "video_backend": video["sampling"]}
        multimodal.media_io_kwargs = {**multimodal.media_io_kwargs, "video": stock}
        service.refuse()
        return
    multimodal.media_io_kwargs = {**multimodal.media_io_kwargs, "video": {**video, "video_backend": NAME}}
    place, device = _place_of_frames(vllm_config, options)
    if place in WHAT_TO_DO:
        logger.warning(
            "%s: option 'device_bytes' has no effect, and frames are copied to the host: %s", NAME, WHAT_TO_DO[place]
        )
    service.configure(options, most_urgent, place, device)
    logger.info(
        "vllm-omni-sched %s decodes videos by %s: frames as %r samples them, requests of class %s or after it. Options "
        "given: %s.",
        __version__,
        NAME,
        video["sampling"],
        most_urgent,
        ", ".join(str(one) for one in resolved(options, group="video") if one.given) or "none",
    )
    # The parent of several API servers decodes nothing, nor do most stages of vLLM-Omni: in these processes, the
    # decoders start with the first video.
    if getattr(vllm_config.parallel_config, "_api_process_rank", 0) >= 0 and "vllm_omni" not in sys.modules:
        service.get()


def video_options(config: OmniSchedConfig) -> VideoOptions:
    """Return the options in the group ``video``.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range; the message names it.
    """
    return read_options(VideoOptions, config.video, group="video")


def _place_of_frames(vllm_config: Any, options: VideoOptions) -> tuple[FramesReason, int]:
    """Return whether frames stay on a device, or why not, and the number of the device on which vLLM preprocesses."""
    if not options.device_bytes:
        return FramesReason.OFF, 0
    import torch

    multimodal = vllm_config.model_config.multimodal_config
    device = (multimodal.mm_processor_kwargs or {}).get("device")
    in_pool = bool(preprocess_options(load_config(vllm_config.additional_config)).processes)
    engines = sum(len(kind.devices) for kind in decoder_kinds(options) if kind.name == NVDEC)
    server = Server(
        options.device_bytes,
        engines,
        video_processor_of(vllm_config.model_config),
        None if device is None or in_pool else torch.device(device).type,
        getattr(multimodal, "mm_tensor_ipc", None),  # vLLM 0.30 or newer
    )
    place = of_server(server)
    return place, (torch.device(device).index or 0) if place is FramesReason.ON_DEVICE else 0
