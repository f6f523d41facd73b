"""Check the options of an engine as far as that needs no model.

``doctor`` makes the same checks by the same functions. It prints all problems; a start ends with the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vllm_omni_sched import compat
from vllm_omni_sched.config.checks import Check
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import check_needs
from vllm_omni_sched.config.options import OmniSchedConfig, ReleaseMode, Toggle
from vllm_omni_sched.config.places import check_file, check_folder
from vllm_omni_sched.engine.preprocess.start import check_preprocessing
from vllm_omni_sched.engine.video.choice import video_options
from vllm_omni_sched.lanes.processors import check_listed, usable_here
from vllm_omni_sched.resource.engine.lending import LendingEngine, refuse_lending
from vllm_omni_sched.video.pool.kinds import decoder_kinds


def option_checks(config: OmniSchedConfig, device: str) -> Iterator[Check]:
    """Yield the checks of an engine's options.

    Args:
        config: the options as the operator gave them, with those of the profile.
        device: the type of the engine's device, as vLLM names it; "" if it is not known.
    """
    yield partial(compat.check_version, config)
    yield partial(compat.resolve, config)
    yield partial(check_needs, config)
    yield partial(_check_video, config)
    yield partial(check_preprocessing, config)
    if config.release is ReleaseMode.SPILL and config.spill_dir is not None:
        yield partial(check_folder, "spill_dir", config.spill_dir)
    if config.history_path is not None:
        yield partial(check_file, "expert.history_path", config.history_path)
    if config.encoder_share_bytes:
        yield partial(check_folder, "expert.encoder_share_dir", config.encoder_share_dir)
    if config.encode_ahead:
        yield partial(_check_lane, config, device)
    bytes_per_embed = config.encode_bytes_per_embed
    engine = LendingEngine(device or "cpu", config.encode_ahead, bytes_per_embed=bytes_per_embed)
    yield partial(refuse_lending, config.kv_lending, engine)


def _check_video(config: OmniSchedConfig) -> None:
    options = video_options(config)
    if options.nvdec is Toggle.ON:
        decoder_kinds(options)


def _check_lane(config: OmniSchedConfig, device: str) -> None:
    if config.encode_lane_sms is not None and device not in ("cuda", ""):
        raise ConfigError(f"option 'expert.encode_lane_sms' needs a CUDA device, not {device!r}: leave it out")
    if device in ("cpu", ""):
        check_listed(config.encode_lane_cpus, usable_here())
