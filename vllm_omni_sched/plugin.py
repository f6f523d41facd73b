"""`register()`, the entry point in ``vllm.general_plugins``.

vLLM calls it in the API server, the engine core, every worker and the subprocess that inspects models, sometimes twice.
It hooks two methods, which do nothing unless this engine was started with our scheduler or our video loader, and it
registers our video loader. If vLLM-Omni is loaded, or once its engine is, our connectors are registered there, too.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.load import KEY, load_config
from vllm_omni_sched.engine.named import uses_our_scheduler
from vllm_omni_sched.engine.video import choice, service
from vllm_omni_sched.engine.video.loader import FlashCodecLoader
from vllm_omni_sched.engine.video.rules import NAME
from vllm_omni_sched.imports import when_imported, wrap_once
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


def register() -> None:
    """Install all hooks into vLLM. Idempotent; either all hooks are set or none.

    Raises:
        MissingSymbolError: never; a vLLM without these methods is left unchanged, and starting our scheduler there
            reports what is missing.
    """
    hooks = [
        (compat.ARG_UTILS, "EngineArgs", "create_engine_config", _check_options_early),
        (compat.WORKER_BASE, "WorkerWrapperBase", "init_device", _promote_after_init_device),
    ]
    try:
        found = [(getattr(import_module(module), cls), name, wrap) for module, cls, name, wrap in hooks]
        for cls, name, _ in found:
            getattr(cls, name)
        loaders = import_module(compat.VIDEO).VIDEO_LOADER_REGISTRY
    except (ImportError, AttributeError) as error:
        logger.warning("vllm-omni-sched is not active, because this vLLM lacks an extension point: %s", error)
        return
    for cls, name, wrap in found:
        wrap_once(cls, name, wrap)
    loaders.register(NAME)(FlashCodecLoader)  # only a name, until an operator chooses it

    if "vllm_omni" in sys.modules:
        _know_stages()
    else:  # this process has no stages, or not yet
        when_imported("vllm_omni.engine.async_omni_engine", _know_stages)


def _know_stages() -> None:
    from vllm_omni_sched.omni.registration import register_connectors

    register_connectors()


def _check_options_early(create_engine_config: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = choice.is_chosen(self)
        with choice.without_our_loader(self) if chosen else nullcontext():
            vllm_config = create_engine_config(self, *args, **kwargs)
        if uses_our_scheduler(vllm_config):
            from vllm_omni_sched.engine.start import check_and_attach

            check_and_attach(vllm_config)
        else:
            _warn_of_unused(vllm_config, chosen)
        if chosen:
            choice.set_up(vllm_config, self.media_io_kwargs)
        else:
            service.refuse()
        return vllm_config

    return wrapper


def _warn_of_unused(vllm_config: Any, loader_chosen: bool) -> None:
    """Say once for a server that options of ours have no effect without our scheduler.

    Those of the video loader have one if it is chosen without a profile. Otherwise nothing of ours is read or refused.
    """
    additional, parallel = vllm_config.additional_config, vllm_config.parallel_config
    if not isinstance(additional, Mapping) or KEY not in additional:
        return
    if parallel._api_process_rank > 0 or (parallel._api_process_rank == 0 and parallel._api_process_count > 1):
        return  # the parent of several API processes says it
    options = additional[KEY]
    unused = list(options) if isinstance(options, Mapping) else [options]
    if loader_chosen:
        unused = sorted(load_config(additional).given - {"video"})
        if not unused:
            return
    logger.warning(
        "Options of omni_sched are given (%s), but --scheduler-cls is not vllm_omni_sched.OmniScheduler: they have no "
        "effect. Add --scheduler-cls vllm_omni_sched.OmniScheduler, or remove them.",
        ", ".join(map(str, unused)) or "defaults",
    )


def _promote_after_init_device(init_device: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_device(self, *args, **kwargs)
        if uses_our_scheduler(self.vllm_config):
            from vllm_omni_sched.engine.runners.promote import promote_worker

            promote_worker(self.worker, self.vllm_config)
        return result

    return wrapper
