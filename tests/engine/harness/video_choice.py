"""Choosing our video loader at start-up. `python -m tests.engine.harness.video_choice MODEL` tries each case.

All in one process, and only as far as vLLM's configuration: no engine and no decoder is started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

OURS = "omni_flashcodec"
VARIABLE = {"VLLM_VIDEO_LOADER_BACKEND": OURS}


@dataclass(frozen=True)
class Case:
    """Settings of one engine.

    `models_own`: a loader that the model's configuration names, as Nemotron's does. `engines`: of GPUs, in place of
    those of this machine.
    """

    video: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    models_own: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    engines: int | None = None


NAMED = {"video_backend": OURS}
SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # vLLM requires it with torch_shm
ON_DEVICE: dict[str, Any] = {"mm_processor_kwargs": {"device": "cuda:1"}, "mm_tensor_ipc": "torch_shm"}
DEVICE_BYTES = {"nvdec": "auto", "device_bytes": 1 << 20}
CASES = {
    "neither": Case({"num_frames": 4}),
    "arguments": Case(NAMED | {"num_frames": 4}),
    "variable": Case(environment=VARIABLE),
    "variable-and-arguments": Case({"num_frames": 4}, VARIABLE),
    "rule": Case(NAMED | {"sampling": "opencv_dynamic"}),
    "other-loader": Case({"video_backend": "opencv"}, VARIABLE),
    "models-configuration": Case(NAMED, models_own="nemotron_vl"),
    "variable-and-models-configuration": Case(environment=VARIABLE, models_own="nemotron_vl"),
    "models-configuration-alone": Case(models_own="nemotron_vl"),
    "options": Case(NAMED, options={"decoders": 1, "nice": 5}),
    "device-frames": Case(NAMED, SPAWN, options=DEVICE_BYTES, more=ON_DEVICE, engines=2),
    "device-frames-off": Case(NAMED, SPAWN, more=ON_DEVICE, engines=2),
    "device-frames-read-on-the-host": Case(
        NAMED, SPAWN, options=DEVICE_BYTES, more={"mm_tensor_ipc": "torch_shm"}, engines=2
    ),
    "device-frames-sent-through-the-host": Case(
        NAMED, SPAWN, options=DEVICE_BYTES, more=ON_DEVICE | {"mm_tensor_ipc": "direct_rpc"}, engines=2
    ),
    "device-frames-without-engines": Case(NAMED, SPAWN, options=DEVICE_BYTES, more=ON_DEVICE, engines=0),
    "other-decoder": Case(NAMED | {"backend": "torchcodec"}),
    "no-such-rule": Case(NAMED | {"sampling": "qwen2_vll"}),
    "unknown-option": Case(NAMED, options={"decodres": 1}),
    "wrong-option": Case(NAMED, options={"nice": 30}),
    "wrong-option-unchosen": Case(
        options={"nice": 30}, more={"scheduler_cls": "vllm_omni_sched.OmniScheduler", "async_scheduling": False}
    ),
}


def outcome(case: Case, model: str) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import config as models

    from vllm_omni_sched.engine.video import choice, service
    from vllm_omni_sched.video.on_device import FramesReason
    from vllm_omni_sched.video.pool.kinds import NVDEC, DecoderKind
    from vllm_omni_sched.video.sandbox.seccomp import Profile

    class ModelsOwn(models.VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            video = model_config.multimodal_config.media_io_kwargs.setdefault("video", {})
            video.setdefault("video_backend", case.models_own)

    given = None if case.video is None else {"video": dict(case.video)}
    args: dict[str, Any] = {"model": model, "dtype": "float32", "max_model_len": 1024, **case.more}
    if given is not None:
        args["media_io_kwargs"] = given
    if case.options is not None:
        args["additional_config"] = {"omni_sched": {"video": dict(case.options)}}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, case.environment))
        started = stack.enter_context(mock.patch.object(service, "get"))
        stack.enter_context(mock.patch.object(service, "_options", None))
        stack.enter_context(mock.patch.object(service, "_place", FramesReason.OFF))
        stack.enter_context(mock.patch.object(service, "_device", 0))
        if case.engines is not None:
            nvdec = DecoderKind(NVDEC, "nothing:starts", Profile.DEVICE, (0,) * case.engines)
            stack.enter_context(mock.patch.object(choice, "decoder_kinds", return_value=(nvdec,)))
        if case.models_own:
            own = {"Qwen2VLForConditionalGeneration": ModelsOwn}
            stack.enter_context(mock.patch.dict(models.MODELS_CONFIG_MAP, own))
        engine_args = EngineArgs(**args)
        try:
            config = engine_args.create_engine_config()
        except Exception as error:  # noqa: BLE001  the test says which it must be
            return {"error": type(error).__name__, "message": str(error)}
        return {
            "video": config.model_config.multimodal_config.media_io_kwargs.get("video"),
            "arguments_kept": engine_args.media_io_kwargs == (given or {}),
            "started": started.call_count,
            "refused": service._refused,
            "frames": [service._place.value, service._device],
            "options": service._options and service._options.model_dump(include=set(case.options or ())),
        }


def main(model: str) -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    print(json.dumps({name: outcome(case, model) for name, case in CASES.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
