"""Detection of engines that were started with our scheduler."""

from importlib import import_module
from typing import Any


def uses_our_scheduler(vllm_config: Any) -> bool:
    """Return whether this engine was started with ``--scheduler-cls vllm_omni_sched…``, or a subclass of our
    schedulers.
    """
    return names_our_scheduler(vllm_config.scheduler_config.scheduler_cls)


def names_our_scheduler(scheduler_cls: Any) -> bool:
    """Return whether this value of ``--scheduler-cls`` is one of our schedulers, or a subclass of one."""
    if scheduler_cls is None:
        return False
    if isinstance(scheduler_cls, str):
        if scheduler_cls.startswith("vllm_omni_sched."):
            return True
        if scheduler_cls.startswith("vllm."):
            return False
        module, _, name = scheduler_cls.rpartition(".")
        try:
            scheduler_cls = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError):
            return False  # vLLM reports the error
    return any(base.__module__.startswith("vllm_omni_sched.") for base in scheduler_cls.__mro__)
