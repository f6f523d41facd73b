"""OmniScheduler: vLLM's scheduler with bookkeeping whose cost does not grow with a session.

A step is vLLM's own: observe, ``super().schedule()``, then replace the messages to the workers about sessions. This
module makes no scheduling decisions; it only reduces what they cost.
"""

import weakref
from collections.abc import Iterable
from functools import cache, partial
from itertools import chain
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config import OmniSchedConfig, ReleaseMode, load_config
from vllm_omni_sched.engine import block_ids, rebind
from vllm_omni_sched.engine.encoder_cache import OmniEncoderCacheManager
from vllm_omni_sched.engine.encoder_worth import manager_for
from vllm_omni_sched.engine.ended import EndedSessions
from vllm_omni_sched.engine.metrics_bridge import MetricsPublisher
from vllm_omni_sched.engine.order import index_items, sort_update
from vllm_omni_sched.engine.passed import PassedInputsMixin
from vllm_omni_sched.engine.pending import PendingRangeMixin
from vllm_omni_sched.engine.release import CommittedRelease
from vllm_omni_sched.engine.session import SessionSender, with_restored
from vllm_omni_sched.engine.start_line import start_line
from vllm_omni_sched.engine.steered import SteeredMixin
from vllm_omni_sched.engine.stranded import StrandedSessionsMixin
from vllm_omni_sched.engine.windowed import WindowedInputsMixin
from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.items import FeatureList, is_in_line
from vllm_omni_sched.items.feature_list import Strip
from vllm_omni_sched.logs import logger_name
from vllm_omni_sched.monitor.counts import SchedulerMetrics

logger = init_logger(logger_name(__name__))

_STEPS_PER_SAMPLE = 16  # steps per sample of schedule_seconds: reading the clock costs a tenth of a decode step


def _refresh(
    metrics: SchedulerMetrics, manager: EncoderCacheManager, sender: SessionSender | None, planner: Any
) -> None:
    """Copy the counts of other objects into ``metrics`` when they are published, so that steps pay nothing for it."""
    if isinstance(manager, OmniEncoderCacheManager):
        manager.count_into(metrics)
    if sender is not None:
        metrics.sessions = len(sender)
    if planner is not None:
        planner.count_into(metrics)


class OmniSchedulerMixin(
    SteeredMixin, WindowedInputsMixin, PassedInputsMixin, PendingRangeMixin, StrandedSessionsMixin
):
    """The additions of `OmniScheduler` and `OmniSyncScheduler` to vLLM's schedulers.

    1. The items of a session become a `FeatureList` when it is added, which its updates extend. So do nested items,
       and the items of a request that begins behind a computed prefix. All other requests keep vLLM's own list:
       reading an item of a subclass costs twice as much, and vLLM reads each item some ten times.
    2. vLLM decides a step's encoder inputs on the items that overlap its tokens.
    3. Items that a worker has consumed are stripped by a frontier, and their raw data leaves memory; preemption and
       rewinds restore it.
    4. Workers are sent what is new in a session, not the whole session.
    5. Which requests run, with how many tokens, and what is evicted is unchanged; only the options of
       `SteeredMixin` and `encoder_cache_order` "worth" change it, all off by default.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_config: Any = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        self.omni_config = load_config(vllm_config.additional_config)
        compat.check_version(self.omni_config)
        self.omni_features = compat.resolve(self.omni_config)
        super().__init__(*args, **kwargs)
        self._omni_setup(self.omni_config)
        logger.info("%s", start_line(self, self.omni_config, self.omni_features))

    def _omni_setup(self, config: OmniSchedConfig) -> None:
        active = {name for name, status in self.omni_features.items() if status.active}
        strip_one = compat.strip_feature()
        if "windows" in active:
            rebind.bind_windows()
        uses_mrope = getattr(self, "model_uses_mrope", False) or self.vllm_config.model_config.uses_mrope
        self._omni_runner_v2 = bool(getattr(self, "use_v2_model_runner", False))
        self._omni_windows = "windows" in active and not self.is_encoder_decoder
        self._omni_native_windows = compat.native_windows(compat.SCHEDULER)
        self._omni_pending = "pending_range" in active and self._omni_runner_v2 and not self.is_encoder_decoder
        self.omni_metrics = SchedulerMetrics()
        self._omni_ended = EndedSessions()
        self._omni_sessions: set[str] = set()
        self._omni_num_multimodal = 0  # requests with a FeatureList
        if "strip_frontier" in active:
            rebind.bind_strip_frontier()
        if "kv_event_window" in active:
            rebind.bind_kv_event_window()
        if "encoder_cache" in active:
            model_config = self.vllm_config.model_config
            self.encoder_cache_manager = manager_for(self.encoder_cache_manager, config, model_config)
        self._omni_frees_at_once = (
            isinstance(self.encoder_cache_manager, OmniEncoderCacheManager)
            and getattr(self, "ec_connector", None) is None  # a connector is notified of each item
            and not self.is_encoder_decoder
        )
        self._omni_strip: Strip = lambda feature: strip_one(feature, uses_mrope)
        self._omni_sender: SessionSender | None = None
        if "session_delta" in active and compat.workers_take_deltas(self.vllm_config, config):
            self._omni_sender = SessionSender(self._omni_strip, self.omni_metrics)
        # Only items behind the frontier may leave memory, and only deltas move the frontier.
        self._omni_release: CommittedRelease | None = None
        if config.release is ReleaseMode.SPILL and self._omni_sender is not None:
            self._omni_release = CommittedRelease(config, self._omni_strip, self.omni_metrics)
        self._omni_steer(config)
        # Policies that look ahead, searches that walk all items, and KV events query the index of every request.
        self._omni_index_all = (
            not self._omni_native_windows
            or self._omni_planner is not None
            or self._omni_steering is not None
            or self._omni_rounds is not None
            or self.enable_kv_cache_events
        )
        self._omni_publisher: MetricsPublisher | None = None
        if config.metrics and self.log_stats:
            self._omni_publisher = MetricsPublisher(
                self.omni_metrics,
                self.vllm_config,
                interval_seconds=config.metrics_interval_seconds,
                refresh=partial(
                    _refresh, self.omni_metrics, self.encoder_cache_manager, self._omni_sender, self._omni_planner
                ),
            )
            self._omni_publisher.start()
            weakref.finalize(self, self._omni_publisher.close)

    # -- a step ------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._omni_ended.refused:
            self.finish_requests(list(self._omni_ended.refused), RequestStatus.FINISHED_ERROR)
        metrics = self.omni_metrics
        metrics.steps += 1
        sampled = metrics.steps % _STEPS_PER_SAMPLE == 0
        started = monotonic_seconds() if sampled else 0.0
        if self._omni_steers:
            output = self._omni_schedule_steered(*args, **kwargs)
        else:
            output = super().schedule(*args, **kwargs)
        if self._omni_sessions and self._omni_sender is not None:
            self._omni_sender.replace(output, self.requests)
            if self._omni_release is not None:
                self._omni_release.after(output, self.requests)
        if sampled:
            metrics.schedule_seconds.observe(monotonic_seconds() - started)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if self._omni_steers:
            self._omni_observe(args[0] if args else kwargs["scheduler_output"], outputs)
        return self._omni_ended.report(outputs) if self._omni_ended.refused else outputs

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[Any, ...]:
        call: Any
        if self._omni_steers:
            call = self._omni_inputs_steered
        elif num_computed_tokens or type(request.mm_features) is not list:
            call = self._omni_inputs
        else:  # the first tokens of a prompt whose items are in order: vLLM's own search is exact
            self.omni_metrics.windows_native += self._omni_windows
            call = super()._try_schedule_encoder_inputs
        return call(request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens)

    def _make_cached_request_data(
        self, running_reqs: list[Request], resumed_reqs: list[Request], *args: Any, **kwargs: Any
    ) -> CachedRequestData:
        data: CachedRequestData = super()._make_cached_request_data(running_reqs, resumed_reqs, *args, **kwargs)
        restored = {}
        if self._omni_num_multimodal and not self._omni_runner_v2 and (resumed_reqs or self.connector):
            # A running request is rewound only if its blocks failed to load; any other is preempted first.
            restored = self._omni_restore(chain(resumed_reqs, running_reqs) if self.connector else resumed_reqs)
        if self._omni_sessions and self._omni_sender is not None:
            self._omni_sender.note_running(data)
        return with_restored(data, restored) if restored else data

    def _omni_restore(self, requests: Iterable[Request]) -> dict[str, dict[int, Any]]:
        """Return the items that runner V1 must be sent again, because their requests were rewound to before stripped
        items.
        """
        restored = {}
        for request in requests:
            features = request.mm_features
            if not features or not isinstance(features, FeatureList):
                continue
            if features.is_behind(request.num_computed_tokens):
                restored[request.request_id] = back = features.rewind(request.num_computed_tokens)
                self.omni_metrics.restored_items += len(back)
                if self._omni_sender is not None:
                    self._omni_sender.note_restored(request.request_id, features.frontier)
        return restored

    # -- a request's life --------------------------------------------------

    def add_request(self, request: Request) -> None:
        features = request.mm_features
        if request.resumable or (features and (self._omni_index_all or not is_in_line(features))):
            self._omni_admit(request)
        if self._omni_steers:
            self._omni_enter(request)
        super().add_request(request)

    def _omni_admit(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        if self._omni_index(request) if is_new else sort_update(request):
            logger.warning_once(
                "A request has its multimodal items out of order of their tokens; such items are sorted on arrival."
            )
        if is_new and request.resumable:
            if request.request_id in self._omni_ended:
                self._omni_ended.refuse(request)
            features: Any = request.mm_features
            features.grows = True
            self._omni_sessions.add(request.request_id)
            if self._omni_sender is not None:
                features.defer = True
                if self.connector is None:
                    block_ids.look_up_lazily(self.kv_cache_manager, self._omni_sender.trackers)

    def _omni_index(self, request: Request) -> bool:
        """Make the items of this request a `FeatureList`. Return False if they were in order already."""
        self._omni_num_multimodal += 1
        return index_items(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self._omni_sender is not None:
            self._omni_sender.forget(request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)
        if isinstance(request.mm_features, FeatureList):
            self._omni_freed(request)
        if self._omni_steers:
            self._omni_leave(request)
        return result

    def _omni_freed(self, request: Request) -> None:
        features: Any = request.mm_features
        self._omni_num_multimodal -= 1
        if features.spill is not None:
            self.omni_metrics.spilled_bytes -= features.spill.size_bytes
        features.close()
        # Not by `resumable`: vLLM clears that flag of a session that it ends with an error.
        if request.request_id in self._omni_sessions:
            self._omni_sessions.remove(request.request_id)
            if self._omni_sender is not None:
                self._omni_sender.forget(request.request_id)
            self._omni_ended.add(request.request_id)

    def shutdown(self) -> None:
        if self._omni_publisher is not None:
            self._omni_publisher.close()
        super().shutdown()


class OmniSyncScheduler(OmniSchedulerMixin, Scheduler):
    """The variant of `OmniScheduler` for synchronous scheduling, which `OmniScheduler` selects by itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(_for_model(cls, kwargs.get("vllm_config", args[0] if args else None)))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_config: Any = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if vllm_config.scheduler_config.async_scheduling:
            raise ConfigError(
                "OmniSyncScheduler cannot run under async scheduling, which is on: name vllm_omni_sched.OmniScheduler "
                "as --scheduler-cls (it takes either), or add --no-async-scheduling"
            )
        super().__init__(*args, **kwargs)


class OmniScheduler(OmniSchedulerMixin, AsyncScheduler):
    """The scheduler to name on the command line: ``--scheduler-cls vllm_omni_sched.OmniScheduler``.

    It is built on vLLM's AsyncScheduler, so that run-ahead is kept (a subclass of plain Scheduler loses it silently:
    vllm#43724). If ``async_scheduling`` is off, the call returns an `OmniSyncScheduler` instead. For a diffusion LLM,
    either is mixed into vLLM's scheduler for such models.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        vllm_config = kwargs.get("vllm_config", args[0] if args else None)
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
