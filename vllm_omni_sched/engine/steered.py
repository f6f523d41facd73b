"""The steps of a scheduler with any of the options that decide which requests run."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config import OmniSchedConfig, OrderMode
from vllm_omni_sched.engine.ahead import planner_half
from vllm_omni_sched.engine.encoder_inputs import DecidesInputs, Inputs
from vllm_omni_sched.engine.prompt_tokens import prompt_tokens_of
from vllm_omni_sched.engine.refusals import Refusals
from vllm_omni_sched.engine.rounds import RoundsPlanner, refuse_rounds
from vllm_omni_sched.engine.sla import SlaBook
from vllm_omni_sched.engine.steer import Steering
from vllm_omni_sched.errors import RequestError
from vllm_omni_sched.graph.order import WaitingOrder
from vllm_omni_sched.items.feature_list import Strip
from vllm_omni_sched.logs import logger_name
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.slo import SloMeter
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter

logger = init_logger(logger_name(__name__))


class SteeredSteps:
    """Steps under our policies (`StepPolicies`): observe, plan, ``super().schedule()``, apply, record.

    One exists only with an option that asks for a policy; without any, a step is vLLM's own.
    """

    def __init__(
        self,
        scheduler: Any,
        config: OmniSchedConfig,
        metrics: SchedulerMetrics,
        inputs: DecidesInputs,
        refusals: Refusals,
        strip: Strip,
    ) -> None:
        self._scheduler, self.metrics, self._inputs, self._refusals = scheduler, metrics, inputs, refusals
        self._strip = strip
        costs = CostModel()
        scheduler._omni_step_time = monotonic_seconds()
        self.book = SlaBook(config, costs)
        self._meter = StepMeter()
        self.planner = planner_half(scheduler, self.book, self._meter, metrics)
        steering = Steering(scheduler, config, costs, metrics)
        self.steering = steering if steering.active else None
        self.rounds: RoundsPlanner | None = None
        if config.encode_rounds:
            refuse_rounds(config, scheduler.vllm_config.model_config)
            self.rounds = RoundsPlanner(scheduler, config, self.book, self._meter, metrics)
        self.slo = SloMeter(metrics) if config.slo_metrics else None
        self._by_sla = config.waiting_order is OrderMode.SLA
        if self._by_sla:
            scheduler.omni_order_by(WaitingOrder(config.max_wait_seconds), self.book, metrics)

    @property
    def active(self) -> bool:
        """Whether any option asks for a policy."""
        return self._by_sla or self.slo is not None or self.looks_ahead

    @property
    def looks_ahead(self) -> bool:
        """Whether a policy looks at items beyond the current step, so that all of them need an index."""
        return any(part is not None for part in (self.planner, self.steering, self.rounds))

    def schedule(self, schedule: Callable[..., SchedulerOutput], *args: Any, **kwargs: Any) -> SchedulerOutput:
        now = self._scheduler._omni_step_time = monotonic_seconds()
        rounds = self.rounds
        with (
            self.steering.limits() if self.steering is not None else nullcontext(),
            rounds.limits(now) if rounds is not None else nullcontext(),
        ):
            output = schedule(*args, **kwargs)
        if rounds is not None:
            rounds.scheduled(output, now)
        if self.planner is not None:
            for new in output.scheduled_new_reqs:
                if self.planner.goes_ahead(new.req_id):  # data that went to the lane is not sent again
                    new.mm_features = [self._strip(feature) for feature in new.mm_features]
        return output

    def decide(
        self,
        scheduler: Any,
        ask: Callable[..., Inputs],
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int,
    ) -> Inputs:
        """Decide with the tokens and the encoder budget that the policies leave."""
        budget, shift = encoder_compute_budget, shift_computed_tokens
        if self.planner is not None:
            num_new_tokens = self.planner.cut(request, num_computed_tokens, num_new_tokens)
        if self.rounds is not None:
            num_new_tokens = self.rounds.cut(request, num_computed_tokens, num_new_tokens, shift)
        if self.steering is None:
            return self._inputs.decide(scheduler, ask, request, num_computed_tokens, num_new_tokens, budget, shift)
        part = self.steering.encoder_budget(request.mm_features, num_computed_tokens, budget)
        inputs, num_tokens, left, *more = self._inputs.decide(
            scheduler, ask, request, num_computed_tokens, num_new_tokens, part, shift
        )
        self.steering.encoded(request, inputs)
        return (inputs, num_tokens, budget - (part - left), *more)

    def observe(self, scheduler_output: SchedulerOutput, outputs: dict[int, Any]) -> None:
        """Give the policies the time of a step, and record the tokens of each request."""
        output = scheduler_output
        now = monotonic_seconds()
        planner, num_requests, prompt_tokens = (
            self.planner,
            len(output.num_scheduled_tokens),
            prompt_tokens_of(output),
        )
        seconds = self._meter.step(
            now,
            len(self._scheduler.running),
            prompt_tokens,
            rest_seconds=0.0 if planner is None else planner.rest_seconds,
            encoded=bool(output.scheduled_encoder_inputs),
        )
        if seconds is not None and prompt_tokens:
            self.book.costs.prefilled(prompt_tokens, self._meter.seconds_per_token * prompt_tokens)
        if planner is not None:
            planner.stepped(now)
        if seconds is not None and self.steering is not None:
            self.steering.stepped(now, seconds, num_requests, prompt_tokens)
        if self.rounds is not None:
            self.rounds.stepped(output, now)
        if self.slo is None:
            return
        metrics = self.metrics
        metrics.step_requests.observe(num_requests)
        for of_client in outputs.values():
            for one in of_client.outputs:
                if one.new_token_ids:
                    self.slo.token(one.request_id, now)
                if one.finish_reason is not None:
                    self.slo.end(one.request_id, counts=True)

    # -- a request's life --------------------------------------------------

    def enter(self, request: Request) -> None:
        now = monotonic_seconds()
        if request.request_id in self._scheduler.requests:
            if self.slo is not None:
                self.slo.rest(request.request_id, now)
            return
        try:
            sla = self.book.enter(request, now)
        except RequestError as error:
            logger.error("Request %s is refused: %s", request.request_id, error)
            self._refusals.refuse(request.request_id, request.client_index)
            return
        if self.slo is not None:
            self.slo.begin(request.request_id, sla, now)

    def leave(self, request: Request) -> None:
        self.book.leave(request.request_id)
        if self.rounds is not None:
            self.rounds.ended(request)
        if self.slo is not None and request.status in (
            RequestStatus.FINISHED_ABORTED,
            RequestStatus.FINISHED_ERROR,
        ):
            self.slo.end(request.request_id, counts=request.status is RequestStatus.FINISHED_ERROR)
