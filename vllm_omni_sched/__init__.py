"""A drop-in multimodal batch scheduler for vLLM and vLLM-Omni.

Importing this package imports neither vLLM nor torch; the public names below
load what they need when they are first used. vLLM-Omni's factory knows our
connectors by name from then on, whether it is imported later or was before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_omni_sched import connector_names

__version__ = "0.1.0"

_PUBLIC = {
    "OmniScheduler": "vllm_omni_sched.engine.scheduler",
    "OmniSyncScheduler": "vllm_omni_sched.engine.scheduler",
    "OmniEncoderCacheManager": "vllm_omni_sched.engine.encoder.cache",
    "OmniSchedConfig": "vllm_omni_sched.config.options",
}

__all__ = ["OmniEncoderCacheManager", "OmniSchedConfig", "OmniScheduler", "OmniSyncScheduler", "__version__"]

if TYPE_CHECKING:
    from vllm_omni_sched.config.options import OmniSchedConfig
    from vllm_omni_sched.engine.encoder.cache import OmniEncoderCacheManager
    from vllm_omni_sched.engine.scheduler import OmniScheduler, OmniSyncScheduler


connector_names.offer()


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
