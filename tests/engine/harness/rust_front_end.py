"""Start-ups under vLLM's front end in Rust. `python -m tests.engine.harness.rust_front_end MODEL` tries each case.

All in one process, and only as far as vLLM's configuration: no engine is started, and no front end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.engine.harness.spec import OURS

LOADER = {"video": {"video_backend": "omni_flashcodec"}}
BY_RUST = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": "/bin/false"}


@dataclass(frozen=True)
class Case:
    """`options`: ours. `args`: more fields of vLLM's `EngineArgs`. `rust`: which front end serves."""

    options: Any
    args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    rust: bool = True


CASES = {
    "defaults": Case({}),
    "chat": Case("chat"),
    "video": Case("video"),
    "metrics": Case({"metrics": True}),
    "no metrics": Case({"metrics": False}),
    "slo metrics": Case({"profile": "chat", "slo_metrics": True}),
    "preprocessing": Case({"preprocess": {"processes": 2}}),
    "loader": Case({}, {"media_io_kwargs": LOADER}),
    "loader by variable": Case({}, environment={"VLLM_VIDEO_LOADER_BACKEND": "omni_flashcodec"}),
    "video, in Python": Case("video", rust=False),
}


def outcome(case: Case, model: str) -> dict[str, Any]:
    """Return the error, or what the engine would run under and what it leaves out."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_omni_sched.engine.fitted import fitted_options
    from vllm_omni_sched.engine.video import service

    args = {"model": model, "scheduler_cls": OURS, "dtype": "float32", "max_model_len": 1024, **case.args}
    environment = {**(BY_RUST if case.rust else {}), **case.environment}
    with mock.patch.dict(os.environ, environment), mock.patch.object(service, "get"):
        try:
            config = EngineArgs(**args, additional_config={"omni_sched": case.options}).create_engine_config()
        except Exception as error:  # noqa: BLE001  the test says which it must be
            return {"error": type(error).__name__, "message": str(error)}
        fitted = fitted_options(config)
        return {
            "options": {name: getattr(fitted.config, name) for name in ("metrics", "slo_metrics", "encode_ahead")},
            "left_out": list(map(str, fitted.withheld)),
            "loader": config.model_config.multimodal_config.media_io_kwargs.get("video", {}).get("video_backend"),
        }


def main(model: str) -> None:
    print(json.dumps({name: outcome(case, model) for name, case in CASES.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
