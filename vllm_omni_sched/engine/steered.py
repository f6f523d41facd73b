"""The steps of a scheduler with any of the options that decide which requests run."""

from contextlib import nullcontext
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config import OmniSchedConfig, OrderMode
from vllm_omni_sched.engine.ahead import planner_half
from vllm_omni_sched.engine.ended import EndedSessions
from vllm_omni_sched.engine.prompt_tokens import prompt_tokens_of
from vllm_omni_sched.engine.rounds import RoundsPlanner, refuse_rounds
from vllm_omni_sched.engine.sla import SlaBook
from vllm_omni_sched.engine.steer import Steering
from vllm_omni_sched.engine.waiting import WaitingOrderMixin
from vllm_omni_sched.errors import RequestError
from vllm_omni_sched.graph.order import WaitingOrder
from vllm_omni_sched.items.feature_list import Strip
from vllm_omni_sched.logs import logger_name
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.slo import SloMeter
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter

logger = init_logger(logger_name(__name__))


class SteeredMixin(WaitingOrderMixin):
    """Steps under our policies: observe, plan, ``super().schedule()``, apply, record.

    Its methods are called only while `_omni_steers`; without such an option a step is vLLM's own.
    """

    _omni_planner: Any = None  # the scheduler's half of encode-ahead
    _omni_steers = False
    omni_metrics: SchedulerMetrics
    _omni_ended: EndedSessions
    _omni_strip: Strip

    def _omni_steer(self, config: OmniSchedConfig) -> None:
        """Create the policies that the options ask for; all of them are off by default."""
        metrics = self.omni_metrics
        costs = CostModel()
        self._omni_step_time = monotonic_seconds()
        self._omni_book = SlaBook(config, costs)
        self._omni_meter = StepMeter()
        self._omni_planner = planner_half(self, self._omni_book, self._omni_meter, metrics)
        steering = Steering(self, config, costs, metrics)
        self._omni_steering = steering if steering.active else None
        self._omni_rounds: RoundsPlanner | None = None
        if config.encode_rounds:
            refuse_rounds(config, self.vllm_config.model_config)  # type: ignore[attr-defined]
            self._omni_rounds = RoundsPlanner(self, config, self._omni_book, self._omni_meter, metrics)
        self._omni_slo = SloMeter(metrics) if config.slo_metrics else None
        by_sla = config.waiting_order is OrderMode.SLA
        if by_sla:
            self.omni_order_by(WaitingOrder(config.max_wait_seconds), self._omni_book, metrics)
        self._omni_steers = by_sla or any(
            part is not None for part in (self._omni_planner, self._omni_steering, self._omni_rounds, self._omni_slo)
        )

    def _omni_schedule_steered(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        now = self._omni_step_time = monotonic_seconds()
        rounds = self._omni_rounds
        with (
            self._omni_steering.limits() if self._omni_steering is not None else nullcontext(),
            rounds.limits(now) if rounds is not None else nullcontext(),
        ):
            output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if rounds is not None:
            rounds.scheduled(output, now)
        if self._omni_planner is not None:
            for new in output.scheduled_new_reqs:
                if self._omni_planner.goes_ahead(new.req_id):  # data that went to the lane is not sent again
                    new.mm_features = [self._omni_strip(feature) for feature in new.mm_features]
        return output

    def _omni_inputs_steered(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, budget: int, shift: int
    ) -> tuple[Any, ...]:
        """Call `_omni_inputs` with the tokens and the encoder budget that the policies leave."""
        if self._omni_planner is not None:
            num_new_tokens = self._omni_planner.cut(request, num_computed_tokens, num_new_tokens)
        if self._omni_rounds is not None:
            num_new_tokens = self._omni_rounds.cut(request, num_computed_tokens, num_new_tokens, shift)
        if self._omni_steering is None:
            return self._omni_inputs(request, num_computed_tokens, num_new_tokens, budget, shift)  # type: ignore[attr-defined,no-any-return]
        part = self._omni_steering.encoder_budget(request.mm_features, num_computed_tokens, budget)
        inputs, num_tokens, left, *more = self._omni_inputs(  # type: ignore[attr-defined]
            request, num_computed_tokens, num_new_tokens, part, shift
        )
        self._omni_steering.encoded(request, inputs)
        return (inputs, num_tokens, budget - (part - left), *more)

    def _omni_observe(self, output: SchedulerOutput, outputs: dict[int, Any]) -> None:
        """Give the policies the time of a step, and record the tokens of each request."""
        now = monotonic_seconds()
        planner, num_requests, prompt_tokens = (
            self._omni_planner,
            len(output.num_scheduled_tokens),
            prompt_tokens_of(output),
        )
        seconds = self._omni_meter.step(
            now,
            len(self.running),  # type: ignore[attr-defined]
            prompt_tokens,
            rest_seconds=0.0 if planner is None else planner.rest_seconds,
            encoded=bool(output.scheduled_encoder_inputs),
        )
        if seconds is not None and prompt_tokens:
            self._omni_book.costs.prefilled(prompt_tokens, self._omni_meter.seconds_per_token * prompt_tokens)
        if planner is not None:
            planner.stepped(now)
        if seconds is not None and self._omni_steering is not None:
            self._omni_steering.stepped(now, seconds, num_requests, prompt_tokens)
        if self._omni_rounds is not None:
            self._omni_rounds.stepped(output, now)
        if self._omni_slo is None:
            return
        metrics = self.omni_metrics
        metrics.step_requests.observe(num_requests)
        for of_client in outputs.values():
            for one in of_client.outputs:
                if one.new_token_ids:
                    self._omni_slo.token(one.request_id, now)
                if one.finish_reason is not None:
                    self._omni_slo.end(one.request_id, counts=True)

    # -- a request's life --------------------------------------------------

    def _omni_enter(self, request: Request) -> None:
        now = monotonic_seconds()
        if request.request_id in self.requests:  # type: ignore[attr-defined]
            if self._omni_slo is not None:
                self._omni_slo.rest(request.request_id, now)
            return
        try:
            sla = self._omni_book.enter(request, now)
        except RequestError as error:
            logger.error("Request %s is refused: %s", request.request_id, error)
            self._omni_ended.refused[request.request_id] = request.client_index
            return
        if self._omni_slo is not None:
            self._omni_slo.begin(request.request_id, sla, now)

    def _omni_leave(self, request: Request) -> None:
        self._omni_book.leave(request.request_id)
        if self._omni_rounds is not None:
            self._omni_rounds.ended(request)
        if self._omni_slo is not None and request.status in (
            RequestStatus.FINISHED_ABORTED,
            RequestStatus.FINISHED_ERROR,
        ):
            self._omni_slo.end(request.request_id, counts=request.status is RequestStatus.FINISHED_ERROR)
