"""Start of the preprocessing pool: checks of its options, and the hooks in the API process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError, RequestError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.fitted import engine_options
from vllm_omni_sched.engine.named import uses_our_scheduler
from vllm_omni_sched.engine.preprocess.arrivals import with_one_by_one
from vllm_omni_sched.engine.preprocess.metrics import PreprocessMetrics
from vllm_omni_sched.engine.preprocess.pictures import leaves_undecoded, undecoded_loading
from vllm_omni_sched.engine.preprocess.processor import PooledProcessor
from vllm_omni_sched.engine.preprocess.work import PoolWork
from vllm_omni_sched.graph.order import INTERACTIVE, SlaClass
from vllm_omni_sched.graph.promises import Promises, promises_of
from vllm_omni_sched.imports import when_imported, wrap_once
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.preprocess.options import PreprocessOptions
from vllm_omni_sched.preprocess.pool import PreprocessPool
from vllm_omni_sched.slices import prefer_short_slices

logger = get_logger(__name__)

_SWITCH_SECONDS = 0.0005
"""Time for which a thread of the API process may keep Python's lock while others wait for it; by default 5 ms, which is
how late the event loop then is."""
_SLICE_SECONDS = 0.0002
"""Time slices of the thread of the event loop: with those of the system, it would wait for processes of the pool."""

_extra_args: ContextVar[Any] = ContextVar("omni_sched_extra_args", default=None)
_metrics: PreprocessMetrics | None = None


def preprocess_options(config: OmniSchedConfig) -> PreprocessOptions:
    """Return the options in the group ``preprocess``.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range; the message names it.
    """
    return read_options(PreprocessOptions, config.preprocess, group="preprocess")


def check_preprocessing(config: OmniSchedConfig) -> None:
    """Check that the pool can work here, if the options ask for one.

    Raises:
        ConfigError: it cannot, or its options are wrong.
    """
    if not preprocess_options(config).processes:
        return
    if not sys.platform.startswith("linux"):
        raise ConfigError("option 'preprocess.processes' needs Linux, for memory files and forks: leave it out")
    if why := compat.why_no_preprocessing():
        raise ConfigError(f"option 'preprocess.processes' cannot work: {why}. Leave it out")


def prepare(vllm_config: Any, options: PreprocessOptions) -> None:
    """Hook the pool into this process, if the options ask for one; idempotent."""
    if not options.processes:
        return
    if not vllm_config.model_config.is_multimodal_model:
        logger.info("Option preprocess.processes has no effect: this model takes text alone.")
        return
    wrap_once(compat.renderer_class(), "__init__", _forks_pool)
    when_imported(compat.SERVER_APP, _begin_requests_one_by_one)
    for module, path in compat.SERVING_METHODS:
        when_imported(module, lambda module=module, path=path: _remember_extra_args(module, path))  # type: ignore[misc]


def _forks_pool(init: Any) -> Any:
    def wrapper(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        if self.mm_processor is not None and uses_our_scheduler(config):
            options = engine_options(config)
            if (chosen := preprocess_options(options)).processes:
                _start(self, chosen, promises_of(options))

    return wrapper


def _start(renderer: Any, options: PreprocessOptions, promises: Promises) -> None:
    """Fork the pool, and let this renderer use it.

    Raises:
        ConfigError: this process uses a GPU, so that its forks cannot run.
    """
    if compat.device_is_initialized():
        raise ConfigError(
            "option 'preprocess.processes' cannot work: this process has initialized its GPU before the pool was "
            "forked. Leave it out"
        )
    sys.setswitchinterval(min(_SWITCH_SECONDS, sys.getswitchinterval()))
    metrics = _metrics_of_process()
    media_io = compat.image_media_io()
    load_bytes = getattr(media_io.load_bytes, "__wrapped__", media_io.load_bytes)  # vLLM's own
    compat.load_hf_processor(renderer.mm_processor)
    pool = PreprocessPool(PoolWork(renderer.mm_processor, load_bytes), options, observer=metrics)
    prefer_short_slices(_SLICE_SECONDS)  # not those of the pool, which were forked before
    pooled = PooledProcessor(renderer, pool, metrics.fell_back, lambda: _class_of_request(promises))
    pooled.attach()
    renderer._resources.callback(pooled.close)
    if media_io.load_bytes is load_bytes:
        media_io.load_bytes = undecoded_loading(load_bytes, metrics.fell_back)
        wrap_once(compat.parse_module(), "normalize_image", leaves_undecoded)
    logger.info(
        "%d processes decode pictures and run the HF processor of this model, beside the API process.",
        options.processes,
    )


def _begin_requests_one_by_one() -> None:
    wrap_once(sys.modules[compat.SERVER_APP], "init_entrypoints_middleware", with_one_by_one)


def _remember_extra_args(module: str, path: str) -> None:
    owner, _, name = path.rpartition(".")
    wrap_once(compat.find(module, owner), name, _remembers_extra_args)


def _remembers_extra_args(create: Any) -> Any:
    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _extra_args.set(getattr(request, "vllm_xargs", None))
        return await create(self, request, *args, **kwargs)

    return wrapper


def _class_of_request(promises: Promises) -> SlaClass:
    """Return the class that the request of this task asks for; a request that may not is refused later."""
    extra = _extra_args.get()
    if not isinstance(extra, Mapping):
        return INTERACTIVE
    try:
        promises.check(extra)
        return promises.classify(extra, INTERACTIVE)
    except RequestError:
        return INTERACTIVE


def _metrics_of_process() -> PreprocessMetrics:
    global _metrics
    if _metrics is None:
        _metrics = PreprocessMetrics()
        _metrics.attach()
    return _metrics
