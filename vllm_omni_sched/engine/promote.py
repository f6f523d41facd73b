"""Adds our mixins to live worker objects of vLLM, without changing how vLLM builds them.

The class of an instance is exchanged for a subclass of itself. That works for every runner of every platform and
version, whereas overriding a factory does not (CPU workers build their runner inline).
"""

from typing import Any

from vllm.logger import init_logger

from vllm_omni_sched import compat
from vllm_omni_sched.config import OmniSchedConfig, Toggle, load_config
from vllm_omni_sched.errors import MissingSymbolError
from vllm_omni_sched.logs import logger_name

logger = init_logger(logger_name(__name__))


def mix_in(instance: Any, mixin: type, config: OmniSchedConfig) -> bool:
    """Make ``instance`` an instance of its class *and* ``mixin``; return False if it is one already."""
    cls = type(instance)
    if issubclass(cls, mixin):
        return False
    instance.__class__ = type(
        f"Omni{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__, "__doc__": mixin.__doc__}
    )
    instance.omni_prepare(config)
    return True


def promote_worker(worker: Any, vllm_config: Any) -> None:
    """Add our mixin to the model runner of a worker that has just initialised its device.

    Raises:
        MissingSymbolError: this kind of runner is unknown, and the scheduler is going to send it session deltas.
    """
    config = load_config(vllm_config.additional_config)
    runner = getattr(worker, "model_runner", None)
    if compat.is_runner_v2(runner):
        from vllm_omni_sched.engine.runner_v2 import RunnerV2Mixin

        mix_in(runner, RunnerV2Mixin, config)
    elif compat.is_runner_v1(runner):
        from vllm_omni_sched.engine.runner_v1 import RunnerV1Mixin

        mix_in(runner, RunnerV1Mixin, config)
    elif config.session_delta is not Toggle.OFF and compat.workers_take_deltas(vllm_config, config):
        raise MissingSymbolError(
            f"model runner {type(runner).__qualname__} is unknown to vllm-omni-sched and cannot take session deltas: "
            'set additional_config {"omni_sched": {"session_delta": "off"}}'
        )


def promote_encoder_runner(runner: Any, config: OmniSchedConfig) -> None:
    """Add our mixin to the encoder runner of a V2 model runner, once the model is loaded."""
    encoder_runner = compat.encoder_runner_of(runner)
    if encoder_runner is not None:
        from vllm_omni_sched.engine.runner_v2 import EncoderRunnerMixin

        mix_in(encoder_runner, EncoderRunnerMixin, config)


def promote_rope_state(runner: Any, config: OmniSchedConfig) -> None:
    """Add our mixin to the M-RoPE state of a V2 model runner, once the model is loaded.

    Raises:
        ConfigError: positions of this model cannot be continued, and the option is ``on``.
    """
    from vllm_omni_sched.engine.mrope import RopeStateMixin, continues, refuse_if_on

    if not continues(config, runner.vllm_config, runner.model):
        return
    rope_state = getattr(runner.model_state, "rope_state", None)
    if rope_state is not None:
        mix_in(rope_state, RopeStateMixin, config)
    else:
        refuse_if_on(config, f"{type(runner.model_state).__qualname__} keeps no M-RoPE positions")
