"""What is checked and set up in the front-end process, before any engine starts."""

from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config import Toggle, load_config
from vllm_omni_sched.engine import metrics_bridge
from vllm_omni_sched.errors import ConfigError


def check_and_attach(vllm_config: Any) -> None:
    """Refuse options that cannot work, then let ``/metrics`` of this process serve ours.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range, or is ``on``
            for a model that has no use for it; or the synchronous twin was named under
            async scheduling.
        UnsupportedVllmError: this vLLM is none we support.
        MissingSymbolError: a feature is ``on`` that cannot work here.
    """
    config = load_config(vllm_config.additional_config)
    compat.check_version(config)
    compat.resolve(config)
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    name = scheduler_cls if isinstance(scheduler_cls, str) else scheduler_cls.__name__
    if name.rsplit(".", 1)[-1] == "OmniSyncScheduler" and vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "--scheduler-cls names OmniSyncScheduler, but async scheduling is on: name vllm_omni_sched.OmniScheduler "
            "(it takes either), or add --no-async-scheduling"
        )
    if config.mrope_append is Toggle.ON:
        from vllm_omni_sched.engine.mrope import refuse_if_on, why_not

        refuse_if_on(config, why_not(config, vllm_config))
    if config.metrics:
        metrics_bridge.attach()
