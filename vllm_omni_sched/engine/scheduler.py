"""OmniScheduler: vLLM's schedulers, whose overrides delegate to a `SchedulerExtension`.

A step is vLLM's own: observe, plan, ``super().schedule()``, apply, record. Everything that is decided, counted or
remembered is in `engine.extension`; here is only where vLLM calls it.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.engine.build import build_extension
from vllm_omni_sched.engine.extension import SchedulerExtension
from vllm_omni_sched.engine.fitted import fitted_options
from vllm_omni_sched.engine.start import start_line
from vllm_omni_sched.engine.waiting import WaitingOrderMixin
from vllm_omni_sched.logs import logger_name

logger = init_logger(logger_name(__name__))


if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object  # it is mixed into either of vLLM's schedulers


class OmniSchedulerMixin(WaitingOrderMixin, _Base):
    """Overrides of vLLM's schedulers, each a line or two; what they do is in `SchedulerExtension`."""

    omni: SchedulerExtension

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fitted = fitted_options(_config_of(args, kwargs))
        config = fitted.config
        compat.check_version(config)
        self.omni_features = compat.resolve(config)
        super().__init__(*args, **kwargs)
        self.omni = build_extension(self, config, self.omni_features)
        logger.info("%s", start_line(self, fitted, self.omni_features))

    # -- a step ------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        return self.omni.schedule(self, super().schedule, *args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        return self.omni.updated(self, scheduler_output, outputs)

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[Any, ...]:
        ask = super()._try_schedule_encoder_inputs
        return self.omni.deciding.decide(
            self, ask, request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens
        )

    def _make_cached_request_data(
        self, running_reqs: list[Request], resumed_reqs: list[Request], *args: Any, **kwargs: Any
    ) -> CachedRequestData:
        data = super()._make_cached_request_data(running_reqs, resumed_reqs, *args, **kwargs)
        if self.omni.inputs.num_indexed:
            data = self.omni.cached_requests(self, data, running_reqs, resumed_reqs)
        return data

    if compat.has_pending_inputs():

        def _get_encoder_input_updates(
            self, scheduled: dict[str, int], new_requests: list[Any], scheduled_encoder_inputs: dict[str, list[int]]
        ) -> dict[str, dict[int, Any]]:
            ask = super()._get_encoder_input_updates
            if self.omni.pending is None:
                return ask(scheduled, new_requests, scheduled_encoder_inputs)
            return self.omni.pending.updates(self, ask, scheduled, new_requests, scheduled_encoder_inputs)

    # -- a request's life --------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.resumable or request.mm_features or self.omni.policies is not None:
            self.omni.admit(request, self.requests)
        super().add_request(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.omni.preempted(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)
        if type(request.mm_features) is not list or self.omni.policies is not None:
            self.omni.leave(request)
        return result

    if compat.strands_preempted_sessions():

        def _handle_stopped_request(self, request: Request) -> bool:
            return self.omni.stranded.stopped(request, super()._handle_stopped_request)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        self.omni.extend(self, super()._update_request_as_session, session, update)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        return self.omni.reset_prefix_cache(super().reset_prefix_cache, *args, **kwargs)

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        self.omni.forget_encodings()

    def shutdown(self) -> None:
        self.omni.close()
        super().shutdown()


def _config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the `VllmConfig` among the arguments of a scheduler."""
    return kwargs.get("vllm_config", args[0] if args else None)


class OmniSyncScheduler(OmniSchedulerMixin, Scheduler):
    """The variant of `OmniScheduler` for synchronous scheduling, which `OmniScheduler` selects by itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(_for_model(cls, _config_of(args, kwargs)))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _config_of(args, kwargs).scheduler_config.async_scheduling:
            raise ConfigError(
                "OmniSyncScheduler cannot run under async scheduling, which is on: name vllm_omni_sched.OmniScheduler "
                "as --scheduler-cls (it takes either), or add --no-async-scheduling"
            )
        super().__init__(*args, **kwargs)


class OmniScheduler(OmniSchedulerMixin, AsyncScheduler):
    """Scheduler to name on the command line: ``--scheduler-cls vllm_omni_sched.OmniScheduler``.

    It is built on vLLM's AsyncScheduler, so that run-ahead is kept (a subclass of plain Scheduler loses it silently:
    vllm#43724). If ``async_scheduling`` is off, the call returns an `OmniSyncScheduler` instead. For a diffusion LLM,
    either is mixed into vLLM's scheduler for such models.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        vllm_config = _config_of(args, kwargs)
        if cls is OmniScheduler and vllm_config is not None and not vllm_config.scheduler_config.async_scheduling:
            return OmniSyncScheduler(*args, **kwargs)
        return super().__new__(_for_model(cls, vllm_config))


_DIFFUSION, _ASYNC_DIFFUSION = compat.diffusion_schedulers()


def _for_model(cls: type, vllm_config: Any) -> type:
    """Return ``cls``, or for a diffusion LLM its combination with vLLM's scheduler for such models."""
    if not compat.is_diffusion_llm(vllm_config):
        return cls
    base = _ASYNC_DIFFUSION if issubclass(cls, AsyncScheduler) else _DIFFUSION
    return cls if base is None or issubclass(cls, base) else _over(cls, base)


@cache
def _over(cls: type, base: type) -> type:
    name = f"{cls.__name__}Over{base.__name__}"
    return type(name, (cls, base), {"__module__": cls.__module__, "__qualname__": name, "__doc__": cls.__doc__})
