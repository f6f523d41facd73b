"""Adds our mixin to the model runner of a worker, without changing how vLLM builds it."""

from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import MissingSymbolError
from vllm_omni_sched.config.options import Toggle
from vllm_omni_sched.engine.fitted import engine_options
from vllm_omni_sched.engine.runners.extension import mix_in
from vllm_omni_sched.engine.runners.v1 import RunnerV1Mixin
from vllm_omni_sched.engine.runners.v2 import RunnerV2Mixin


def promote_worker(worker: Any, vllm_config: Any) -> None:
    """Add our mixin to the model runner of a worker that has just initialised its device.

    Raises:
        MissingSymbolError: this kind of runner is unknown, and the scheduler is going to send it session deltas.
    """
    config = engine_options(vllm_config)
    runner = getattr(worker, "model_runner", None)
    if compat.is_runner_v2(runner):
        mix_in(runner, RunnerV2Mixin, config)
    elif compat.is_runner_v1(runner):
        mix_in(runner, RunnerV1Mixin, config)
    elif config.session_delta is not Toggle.OFF and compat.workers_take_deltas(vllm_config, config):
        raise MissingSymbolError(
            f"model runner {type(runner).__qualname__} is unknown to vllm-omni-sched and cannot take session deltas: "
            'set additional_config {"omni_sched": {"expert": {"session_delta": "off"}}}'
        )
