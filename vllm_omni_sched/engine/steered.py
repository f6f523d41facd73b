"""The steps of a scheduler with any of the options that decide which requests run: `EngineCore` on vLLM's scheduler."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds, wall_seconds
from vllm_omni_sched.config.errors import ConfigError, RequestError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.history import Transition
from vllm_omni_sched.core.engine.requests import EngineFacts, PromptItem
from vllm_omni_sched.engine.ahead.halves import planner_half
from vllm_omni_sched.engine.encoder.inputs import DecidesInputs, Inputs
from vllm_omni_sched.engine.history_file import HistoryFile, path_of_rank
from vllm_omni_sched.engine.lending.admission import admission_by
from vllm_omni_sched.engine.lending.blocks import LentBlocks
from vllm_omni_sched.engine.lending.facts import lending_facts
from vllm_omni_sched.engine.refusals import Refusals
from vllm_omni_sched.engine.scheduler_view import RequestPrompt, SchedulerView, prompt_tokens_of
from vllm_omni_sched.graph.promises import promises_of, usual_class
from vllm_omni_sched.items.feature_list import Strip
from vllm_omni_sched.logs import logger_name
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.slo import SloMeter
from vllm_omni_sched.monitor.waiting_counts import WaitingCounts
from vllm_omni_sched.resource.engine.pieces import LOOK_AHEAD

logger = init_logger(logger_name(__name__))


def refuse_rounds(config: OmniSchedConfig, model_config: Any) -> None:
    """Refuse ``encode_rounds`` for a model whose items cannot be held back.

    Raises:
        ConfigError: `encode_rounds` is on, and this is an encoder-decoder model.
    """
    if config.encode_rounds and model_config.is_encoder_decoder:
        raise ConfigError(
            "option 'encode_rounds' cannot be on here, because this is an encoder-decoder model: its decoder starts "
            "with the encoder's output, which vLLM does not schedule apart from it. Leave 'encode_rounds' out"
        )


class SteeredSteps:
    """Steps under the policies that decide which requests run, with how many tokens, and what is encoded.

    One exists only with an option that asks for a policy; without any, a step is vLLM's own. With one, a step is:
    observe, plan, ``super().schedule()``, apply, record. vLLM reads its limits in
    each step: they are set before ``super().schedule()``, never above what the engine was profiled for, and restored
    after it. The time of an encode is the time of its step minus the expected time of the step's tokens; a step begins
    when it is scheduled, or when the tokens of the previous one are out, whichever is later.
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
        refuse_rounds(config, scheduler.vllm_config.model_config)
        self._scheduler, self.metrics, self._inputs, self._refusals = scheduler, metrics, inputs, refusals
        self._config = config
        self._strip = strip
        self._admission = compat.admission_limit(scheduler)
        self._promises = promises_of(config)
        self._checks = compat.rust_front_end()  # any other has checked what clients may ask for
        self.planner = planner_half(scheduler)
        ahead = config.model_copy(update={"encode_ahead": self.planner is not None})
        self.history = _history_of(scheduler, config)
        self._silent: set[str] = set()  # with a history: requests without a token
        self.core = EngineCore(ahead, self._facts(), metrics, self.history or 0)
        self.view = SchedulerView(scheduler, self.core.book)
        self.lent = LentBlocks(scheduler.kv_cache_manager.block_pool) if self.core.lending is not None else None
        if self.planner is not None:
            self.planner.bind(scheduler, self.core, self.view, self.lent)
            self.view.waits, self.view.identifiers = self.planner.decisions.ledger.waits, self.planner.identifiers
        self.slo = SloMeter(metrics) if config.slo_metrics else None
        self.waiting = WaitingCounts(metrics) if config.slo_metrics else None
        if self.waiting is None:
            metrics.waiting_requests.clear()  # absent: a gauge that is 0 would say that no request waits
        self._encoder_budget = scheduler.max_num_encoder_input_tokens
        self._plans = self.core.limits.any or self.core.rounds is not None or self.lent is not None
        self._encoding: deque[tuple[SchedulerOutput, float]] = deque()  # steps that encode, and when they began
        self._last = 0.0  # when the tokens of the last step were out
        scheduler._omni_step_time = monotonic_seconds()
        if self.core.order is not None:
            scheduler.omni_order_by(self.core)

    def _facts(self) -> EngineFacts:
        scheduler = self._scheduler
        settings = scheduler.scheduler_config
        device = getattr(getattr(scheduler.vllm_config, "device_config", None), "device_type", "")
        return EngineFacts(
            getattr(scheduler, self._admission),
            scheduler.max_num_scheduled_tokens,
            scheduler.max_num_encoder_input_tokens,
            scheduler.encoder_cache_manager.cache_size,
            paced=device == "cpu",
            splits_prompts=settings.enable_chunked_prefill and not settings.disable_chunked_mm_input,
            read_ahead=compat.read_ahead_of(scheduler),
            graph_embeds=compat.encoder_graph_embeds(scheduler.vllm_config) or 0,
            lending=lending_facts(self._config, scheduler),
        )

    @property
    def active(self) -> bool:
        """Return whether any option asks for a policy, or for what the policies observe."""
        return self.slo is not None or self.core.decides or self.history is not None

    @property
    def looks_ahead(self) -> bool:
        """Return whether a policy looks at items beyond the current step, so that every request needs an index."""
        return self._plans or self.planner is not None

    # -- a step ------------------------------------------------------------

    def schedule(self, schedule: Callable[..., SchedulerOutput], *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan a step, let vLLM schedule it within the plan, and return its output."""
        now = self._scheduler._omni_step_time = monotonic_seconds()
        self.view.changed()
        if self._plans:
            with self._planned(now):
                output = schedule(*args, **kwargs)
        else:
            output = schedule(*args, **kwargs)
        if output.scheduled_encoder_inputs:
            self._encoding.append((output, now))
            if self.core.lending is not None:
                self.core.lending.step_began(self._embeds(output))
        if self.waiting is not None:
            for request_id in _started(output):
                self.waiting.start(request_id)
        if self.history is not None:
            self._note_step(output, now)
        if self.planner is not None:
            for new in output.scheduled_new_reqs:
                if self.planner.decisions.goes_ahead(new.req_id):
                    new.mm_features = self._without_what_goes_to_the_lane(new)
        return output

    def _embeds(self, output: SchedulerOutput) -> int:
        """Return the embeddings that a step encodes."""
        requests = self._scheduler.requests
        inputs = output.scheduled_encoder_inputs.items()
        return sum(requests[one].get_num_encoder_embeds(i) for one, positions in inputs for i in positions)

    def _note_step(self, output: SchedulerOutput, now: float) -> None:
        """Record the requests that begin, lose their memory, or go on after that, in this step."""
        core, cached = self.core, output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._silent.add(new.req_id)
            core.note(Transition.STARTED, new.req_id, now, str(new.num_computed_tokens))
        for request_id in sorted(getattr(output, "preempted_req_ids", None) or ()):
            core.note(Transition.PREEMPTED, request_id, now)
        for request_id in sorted(getattr(cached, "resumed_req_ids", ())):
            core.note(Transition.RESUMED, request_id, now)

    def _without_what_goes_to_the_lane(self, new: Any) -> list[Any]:
        """Return the items of a new request, without the data that a lane gets: it is not sent a second time."""
        prompt, takes = RequestPrompt(self._scheduler.requests[new.req_id]), self.planner.decisions.takes
        return [self._strip(one) if takes(prompt.item(i)) else one for i, one in enumerate(new.mm_features)]

    @contextmanager
    def _planned(self, now: float) -> Iterator[None]:
        """Set the limits of one step, and set requests aside, for the duration of the block."""
        scheduler, settings, core = self._scheduler, self._scheduler.scheduler_config, self.core
        tokens, requests = scheduler.max_num_scheduled_tokens, getattr(scheduler, self._admission)
        embeds, threshold = scheduler.max_num_encoder_input_tokens, settings.long_prefill_token_threshold
        self.view.look()
        if self.lent is not None:
            assert core.lending is not None
            self.lent.resize(core.lending.plan(self.view, now))
        plan = core.begin_step(self.view, requests, tokens, now)
        aside: list[Request] = []
        try:
            if plan.aside:
                first = islice(iter(scheduler.waiting), LOOK_AHEAD)
                aside = [request for request in first if request.request_id in plan.aside]
                for request in aside:
                    scheduler.waiting.remove_request(request)
            setattr(scheduler, self._admission, plan.max_requests)
            scheduler.max_num_scheduled_tokens = plan.max_tokens
            if plan.encoder_embeds is not None:
                scheduler.max_num_encoder_input_tokens = plan.encoder_embeds
            if 0 < plan.longest < plan.max_tokens - self.view.decode_tokens:
                settings.long_prefill_token_threshold = min(threshold, plan.longest) if threshold else plan.longest
            with self._admission_context():
                yield
        finally:
            for request in reversed(aside):
                scheduler.waiting.prepend_request(request)
            scheduler.max_num_scheduled_tokens = tokens
            scheduler.max_num_encoder_input_tokens = embeds
            setattr(scheduler, self._admission, requests)
            settings.long_prefill_token_threshold = threshold
            if core.rounds is not None:
                core.rounds.end()

    def _admission_context(self) -> AbstractContextManager[None]:
        """Return the context in which only requests are admitted that leave room for loans; nothing without lending."""
        lending, scheduler = self.core.lending, self._scheduler
        if lending is None:
            return nullcontext()
        return admission_by(lending, scheduler.kv_cache_manager, scheduler.block_size)

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
        core, tokens = self.core, num_new_tokens
        start, budget, shift = num_computed_tokens, encoder_compute_budget, shift_computed_tokens
        if core.ahead is not None:
            tokens = core.ahead.cut(request.request_id, start, tokens)
        if core.rounds is not None:
            tokens = core.rounds.cut(RequestPrompt(request), start, tokens, self.view, budget, shift)
        part = budget
        if self.lent is not None and self.planner is not None and self.planner.decisions.goes_ahead(request.request_id):
            part = self._encoder_budget  # vLLM counts what it loads from the lane, too, before it knows that
        inputs, tokens, left, *more = self._inputs.decide(scheduler, ask, request, start, tokens, part, shift)
        while inputs and (item := self._without_data(request, inputs)) is not None:
            tokens = max(0, item.start - shift - start)
            inputs, tokens, left, *more = self._inputs.decide(scheduler, ask, request, start, tokens, part, shift)
        return (inputs, tokens, budget - (part - left), *more)

    def _without_data(self, request: Request, inputs: Sequence[int]) -> PromptItem | None:
        """Return the first of these items whose data the worker does not have to encode it in the step, or None.

        The encoding of such an item was in the encoder cache when the request was let through, and has been evicted in
        this step since. The request runs up to the item, which goes to the lane in the next step.
        """
        if self.planner is None or not self.planner.decisions.goes_ahead(request.request_id):
            return None
        items = map(RequestPrompt(request).item, inputs)
        return min(filter(self.planner.decisions.takes, items), key=lambda item: item.start, default=None)

    def observe(self, scheduler_output: SchedulerOutput, outputs: dict[int, Any]) -> None:
        """Give the core the time of a step, and record the tokens of each request."""
        output, now = scheduler_output, monotonic_seconds()
        rest = 0.0 if self.planner is None else self.planner.take_rested()
        prompt_tokens = prompt_tokens_of(output)
        self.view.changed()
        self.core.step_ended(
            self.view,
            now,
            num_running=self.view.num_running,
            num_requests=len(output.num_scheduled_tokens),
            prompt_tokens=prompt_tokens,
            rest_seconds=rest,
            encodes=self._encodes(output, now - rest, prompt_tokens) if output.scheduled_encoder_inputs else None,
        )
        if output.total_num_scheduled_tokens:
            self._last = now
            if self.core.rounds is not None:
                self.view.tokens_out(now)
        if self._silent:
            self._note_first_tokens(outputs, now)
        if self.slo is None or self.waiting is None:
            return
        self.metrics.step_requests.observe(len(output.num_scheduled_tokens))
        for of_client in outputs.values():
            for one in of_client.outputs:
                if one.new_token_ids:
                    self.slo.token(one.request_id, now)
                if one.finish_reason is not None:
                    self._answered(one.request_id)

    def _answered(self, request_id: str) -> None:
        """Record that a request, or an answer of a session, has ended on its own."""
        assert self.slo is not None
        assert self.waiting is not None
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            self.slo.end(request_id, counts=True)
        else:  # a session that goes on
            self.slo.answered(request_id)
            self.waiting.wait_again(request_id)

    def _note_first_tokens(self, outputs: dict[int, Any], now: float) -> None:
        """Record the requests that have their first token with this step."""
        for of_client in outputs.values():
            for one in of_client.outputs:
                if one.new_token_ids and one.request_id in self._silent:
                    self._silent.discard(one.request_id)
                    self.core.note(Transition.FIRST_TOKEN, one.request_id, now)

    def _encodes(self, output: SchedulerOutput, now: float, prompt_tokens: int) -> dict[str, tuple[int, float]]:
        """Return the embeddings of a step's encodes by modality, and their time in proportion to the embeddings.

        Nothing is known if one of the requests has ended: the sizes of its items are gone.
        """
        begun = self._last
        while self._encoding:
            one, at = self._encoding.popleft()
            if one is output:
                begun = max(begun, at)
                break
        embeds: dict[str, int] = {}
        for request_id, items in output.scheduled_encoder_inputs.items():
            request = self._scheduler.requests.get(request_id)
            if request is None:
                return {}
            for i in items:
                modality = request.mm_features[i].modality
                embeds[modality] = embeds.get(modality, 0) + request.get_num_encoder_embeds(i)
        seconds = max(now - begun - self.core.steps.predict(prompt_tokens), 0.0)
        total = sum(embeds.values())
        return {modality: (number, seconds * number / total) for modality, number in embeds.items() if total}

    # -- a request's life --------------------------------------------------

    def enter(self, request: Request) -> None:
        """Take a new request, or an update of a session, before vLLM does."""
        now = monotonic_seconds()
        if request.request_id in self._scheduler.requests:
            if self.slo is not None:
                self.slo.input(request.request_id, now)
            return
        extra: dict[str, Any] = getattr(request.sampling_params, "extra_args", None) or {}
        usual = usual_class(self._promises.classes, session=request.resumable)
        try:
            if self._checks:
                self._promises.check(extra)
            sla = self._promises.classify(extra, usual)
            self.core.enter(request.request_id, sla, now, session=request.resumable)
        except RequestError as error:
            logger.error("Request %s is refused and ends with an error: %s", request.request_id, error)
            self._refusals.refuse(request.request_id, request.client_index)
            return
        if self.slo is not None:
            self.slo.begin(request.request_id, sla, now)
        if self.waiting is not None:
            self.waiting.enter(request.request_id, sla.name)

    def preempted(self, request_id: str) -> None:
        """Record that a request has lost its place in the batch and waits again."""
        if self.waiting is not None:
            self.waiting.wait_again(request_id)

    def leave(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        request_id, status = request.request_id, request.status
        counts = status is not RequestStatus.FINISHED_ABORTED
        self._silent.discard(request_id)
        how = status.name.lower().removeprefix("finished_")
        self.core.leave(request_id, request.num_output_tokens if counts else 0, monotonic_seconds(), how)
        self.view.leave(request_id)
        if self.waiting is not None:
            self.waiting.leave(request_id)
        if self.lent is not None and not len(self.core.book):
            assert self.core.lending is not None
            self.lent.resize(self.core.lending.lent_blocks)
        if self.slo is not None and status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
            self.slo.end(request_id, counts=status is RequestStatus.FINISHED_ERROR)

    def close(self) -> None:
        """Write what is not written yet of the history."""
        if self.history is not None:
            self.history.close()


def _started(output: SchedulerOutput) -> Iterator[str]:
    """Yield the requests that a step takes from the waiting queues: new ones, and those that go on."""
    for new in output.scheduled_new_reqs:  # on model runner V2, preempted ones are among these
        yield new.req_id
    yield from getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())


def _history_of(scheduler: Any, config: OmniSchedConfig) -> HistoryFile | None:
    """Return the file for the history of requests, if an option asks for it."""
    if config.history_path is None:
        return None
    path = path_of_rank(config.history_path, scheduler.vllm_config.parallel_config.data_parallel_rank)
    return HistoryFile(path, config.history_bytes, wall_seconds, monotonic_seconds)
