"""Encode items ahead of their prefill: which go to the lane, and which requests wait for them."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.history import History, Transition
from vllm_omni_sched.core.engine.ledger import LEAST_PIECE, AheadLedger, EncodeState
from vllm_omni_sched.core.engine.requests import EngineFacts, EngineView, Prompt, PromptItem
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter
from vllm_omni_sched.resource.engine.lane import (
    PACE,
    PACE_BESIDE,
    DecodeLoad,
    DecodePace,
    EncodeShare,
    LaneShare,
    Where,
)


class NextChunk(NamedTuple):
    """Answer whether a request may run, with the items that it newly waits for.

    ``wanted``: items that no lane was sent yet.
    """

    may_run: bool
    wanted: Sequence[PromptItem] = ()


class Submission(NamedTuple):
    """An item to encode, and the ticket that the answer must carry."""

    content: str
    ticket: int
    modality: str
    embeds: int


class LaneActions(NamedTuple):
    """Actions of a step: items to encode, in order; encodings to drop, and to put into the encoder cache."""

    submit: Sequence[Submission] = ()
    forget: Sequence[str] = ()
    load: Sequence[str] = ()


_RUN, _HOLD, _NOTHING = NextChunk(True), NextChunk(False), LaneActions()


class EncodeAhead:
    """Keeps the state of encode-ahead in one engine, and decides what is encoded where.

    1. `EncodeShare` decides whether the items of a request's next chunk are encoded in the step or in the lane.
    2. While they are in the lane, the request waits for them; a piece of its prompt in front of the first missing item
       may run if it is worth a step (`LEAST_PIECE`).
    3. A request that once had items in the lane has none of those encoded in a step that a lane can encode: their data
       is not sent a second time.
    4. Streaming sessions, items that a lane cannot encode, and items that the step encodes by a CUDA graph (which is
       quick), are left to the engine.
    5. Only the items of the next chunk are looked at, however many items the request has. They include those that a
       drafter reads behind the chunk.
    6. `LaneShare` follows the inter-token latency; `DecodePace` leaves the lane that share when both use the same
       processors.
    7. Each content is encoded once for all requests that need it at the same time (`AheadLedger`).
    8. A request with an item that cannot be encoded fails, and only such a request.
    9. Without a lane, all items are left to the step, but those of requests of rule 3.
    10. With ``step_embeds``, a larger item is not encoded in the step. With ``piece_embeds``, no piece runs of a
        waiting request that misses a larger item.

    ``share``: the lane's share of the device, in (0, 1]. ``taken_from_lane``, ``items_visited``: counts.
    """

    def __init__(
        self,
        config: OmniSchedConfig,
        facts: EngineFacts,
        costs: CostModel,
        steps: StepMeter,
        metrics: SchedulerMetrics,
        history: History | None,
    ) -> None:
        self._chunk = facts.max_num_batched_tokens + facts.read_ahead
        self._read_ahead, self._graph_embeds = facts.read_ahead, facts.graph_embeds
        self._costs, self._steps, self._metrics, self._history = costs, steps, metrics, history
        self._target = config.itl_target_ms / 1e3
        self._share_goal = config.share_target_seconds or self._target
        self.place = EncodeShare(max_alone_seconds=10 * self._target, max_several_seconds=2 * self._target)
        self._lane_share = LaneShare(config.encode_lane_min_share)
        self._paces = {
            own: DecodePace((pace if config.decode_pace is None else config.decode_pace) if facts.paced else 0.0)
            for own, pace in ((False, PACE), (True, PACE_BESIDE))
        }
        self._own_processors = False
        self._lane_items = 1  # that the lane encodes at a time
        self.ledger = AheadLedger(facts.encoder_cache_embeds)
        self.step_embeds: int | None = None
        self.piece_embeds: int | None = None
        self.share = 1.0
        self.taken_from_lane = 0
        self.items_visited = 0
        self._step_seconds = 0.0  # of the encodes in the step that is being planned
        self._limits: dict[str, int] = {}  # request -> position up to which it may run without its missing items
        self._ahead: set[str] = set()  # requests of rule 3
        self._failed: set[str] = set()
        self._wanted: dict[str, tuple[str, int, float]] = {}  # content -> modality, embeddings, since when
        self._anybody = DecodeLoad(self._target)

    def lane_is(self, items: int, *, own_processors: bool) -> None:
        """Record how many items the lane encodes at a time, 0 if there is none, and whether it has processors of its
        own.
        """
        self.ledger.max_encoding = items + 1  # so that the next item is there when an encode ends
        self._own_processors = own_processors
        self._lane_items = items

    # -- decisions of a step -------------------------------------------------

    def next_chunk(self, prompt: Prompt, start: int, view: EngineView, now: float) -> NextChunk:
        """Decide whether a request may run whose tokens before ``start`` are computed."""
        request_id = prompt.request_id
        self._limits.pop(request_id, None)
        if request_id in self._failed:
            return _HOLD  # it is about to be finished with an error
        if prompt.is_session:
            return _RUN
        missing = self._missing(prompt, start, view)
        if not missing or (request_id not in self._ahead and self._in_step(request_id, missing, view, now)):
            return _RUN
        self._ahead.add(request_id)
        wanted = []
        for item in missing:
            if self.ledger.want(request_id, item.content, item.embeds) is EncodeState.QUEUED:
                wanted.append(item)
                self._wanted.setdefault(item.content, (item.modality, item.embeds, now))
        self._limits[request_id], may_run = self._piece(missing, start)
        if self.piece_embeds is not None and not prompt.runs:
            may_run = may_run and max(item.embeds for item in missing) <= self.piece_embeds
        if self._history is not None and not may_run:
            self._history.add(now, Transition.HELD, request_id, f"for {len(missing)} items")
        return NextChunk(may_run, wanted)

    def _missing(self, prompt: Prompt, start: int, view: EngineView) -> list[PromptItem]:
        state, has_encoding = self.ledger.state, view.has_encoding
        found = []
        for item in prompt.items_within(start, self._chunk):
            self.items_visited += 1
            if self.takes(item) and not has_encoding(item.content) and state(item.content) is not EncodeState.READY:
                found.append(item)
        return found

    def _piece(self, missing: Sequence[PromptItem], start: int) -> tuple[int, bool]:
        """Return where the piece of a prompt ends that needs no missing item, and whether it is worth a step.

        It is shorter than the tokens before the first missing item where a drafter reads embeddings behind the piece.
        """
        end = min(item.start for item in missing) - self._read_ahead
        return end, end - start >= LEAST_PIECE

    def takes(self, item: PromptItem) -> bool:
        """Return whether the lane may encode this item; any other is left to the step."""
        return item.for_lane and item.embeds > self._graph_embeds

    def _in_step(self, request_id: str, missing: list[PromptItem], view: EngineView, now: float) -> bool:
        """Return whether the missing items are encoded in the step; False if the lane has any of them already."""
        if any(self.ledger.state(item.content) is not None for item in missing):
            return False
        if self.step_embeds is not None and any(item.embeds > self.step_embeds for item in missing):
            return False
        if not self._lane_items:
            return True
        seconds = sum(self._costs.encode_seconds(item.modality, item.embeds) for item in missing)
        seconds = seconds or len(missing) * self._target  # nothing was measured: nothing is known to go unnoticed
        # a waiting request is held up, too; so is a session that is between two inputs
        others = self._load(view) or self._anybody if view.num_requests > 1 else None
        placed = self.place.place(others, seconds, min(self._lane_items, len(missing)))
        self._metrics.placements[placed.reason.value] += 1
        if self._history is not None:
            self._history.add(now, Transition.PLACED, request_id, placed.reason.value)
        in_step = placed.where is Where.IN_STEP
        self._step_seconds += seconds if in_step else 0.0
        return in_step

    def _load(self, view: EngineView) -> DecodeLoad | None:
        """Return the running requests as one class under their least target: they all wait for the same steps."""
        least = view.least_itl()
        if least is None:
            return None
        itl = self._steps.itl.seconds
        return DecodeLoad(min(self._target, least), None if itl is None else itl + self._step_seconds)

    def goes_ahead(self, request_id: str) -> bool:
        """Return whether items of this request went to the lane."""
        return request_id in self._ahead

    def cut(self, request_id: str, start: int, tokens: int) -> int:
        """Return how many tokens of a chunk may be computed without the first missing item."""
        limit = self._limits.get(request_id)
        return tokens if limit is None else max(0, min(tokens, limit - start))

    def stops_at(self, prompt: Prompt, view: EngineView) -> int | None:
        """Return up to where a running prompt may be computed before the lane has ended; None if it does not wait."""
        missing = self._missing(prompt, prompt.computed, view) if self.ledger.waits(prompt.request_id) else ()
        if not missing:
            return None
        end, worth_a_step = self._piece(missing, prompt.computed)
        return end if worth_a_step else prompt.computed

    def is_ready(self, content: str) -> bool:
        """Return whether the lane holds this encoding."""
        return self.ledger.state(content) is EncodeState.READY

    def load(self, content: str, now: float) -> bool:
        """Order the load of an encoding for which the encoder cache has made room; False if it is not in the lane."""
        if not self.ledger.load(content):
            return False
        self.taken_from_lane += 1
        if self._history is not None:
            self._history.add(now, Transition.LOADED, "", content)
        return True

    def encode_seconds(self, content: str) -> float:
        """Return the expected seconds to encode a content that is queued for the lane, or in it."""
        modality, embeds, _ = self._wanted[content]
        return self._costs.encode_seconds(modality, embeds)

    def take_actions(self) -> LaneActions:
        """Return the actions that have accumulated since the last call; at least once after each step's decisions."""
        self._step_seconds = 0.0
        if not self.ledger.num_pending and not self.ledger.has_orders:
            return _NOTHING
        orders = self.ledger.take_orders()
        if not orders:
            return _NOTHING
        submit = [Submission(content, ticket, *self._wanted[content][:2]) for content, ticket in orders.submit]
        if len(self._wanted) > 2 * len(self.ledger) + 64:
            self._wanted = {h: w for h, w in self._wanted.items() if self.ledger.state(h) is not None}
        return LaneActions(submit, orders.forget, orders.load)

    def rest_seconds(self, view: EngineView, prompt_tokens: int) -> float:
        """Return for how long the next step, which has tokens, is held back in favour of the lane."""
        pace = self._paces[self._own_processors]
        if not pace.fraction or not self.ledger.num_pending:
            return 0.0
        load = self._load(view)
        seconds, _ = pace.rest(
            self.share,
            self._steps.predict(0),
            self._steps.itl.seconds,
            self._target if load is None else load.itl_target_seconds,
            encoding=True,
            decoding=load is not None,
            prefill=prompt_tokens > 0,
        )
        self._metrics.decode_rest_seconds += seconds
        return seconds

    # -- what happened -------------------------------------------------------

    def encoded(self, content: str, ticket: int, seconds: float, now: float) -> set[str]:
        """Record that the lane has encoded an item; return the requests that need it."""
        metrics = self._metrics
        metrics.ahead_encoded += 1
        metrics.ahead_seconds += seconds
        waited = self.ledger.ready(content, ticket)
        wanted = self._wanted.get(content)
        if wanted is not None:
            modality, embeds, since = wanted
            self._costs.encoded(modality, embeds, seconds)
            if self.ledger.state(content) in (None, EncodeState.READY):  # else a later attempt is under way
                del self._wanted[content]
                metrics.ahead_wait_seconds.observe(now - since)
        if self._history is not None:
            for request_id in waited:
                self._history.add(now, Transition.ENCODED, request_id, content)
        return waited

    def attempt_again(self) -> tuple[tuple[str, int], ...]:
        """Return what is being encoded, as content and new ticket; answers to the earlier attempts are ignored."""
        return self.ledger.attempt_again()

    def failed(self, content: str, ticket: int, now: float) -> None:
        """Record that the lane cannot encode an item; the requests that need it fail (`take_failed`)."""
        self._metrics.ahead_failed += 1
        requests = self.ledger.failed(content, ticket)
        self._failed.update(requests)
        if self.ledger.state(content) is None:  # else a later attempt is under way
            self._wanted.pop(content, None)
        if self._history is not None:
            for request_id in requests:
                self._history.add(now, Transition.FAILED, request_id, content)

    def take_failed(self) -> set[str]:
        """Return, once, the requests that wait for an item that cannot be encoded."""
        failed, self._failed = self._failed, set()
        return failed

    def step_ended(self, view: EngineView, now: float) -> None:
        """Adapt the lane's share to the inter-token latency, now that a step's tokens are out."""
        self._step_seconds = 0.0
        if self.ledger.num_pending:
            target = view.least_itl()
            if target is not None and self._share_goal < target:
                target = self._share_goal
            self.share, reason = self._lane_share.follow(target, self._steps.itl.seconds, now)
            self._metrics.share_updates[reason] += 1

    def leave(self, request_id: str) -> None:
        """Drop all state of a request that has ended."""
        self.ledger.release(request_id)
        self._ahead.discard(request_id)
        self._limits.pop(request_id, None)
        self._failed.discard(request_id)

    def validate(self) -> None:
        """Check the invariants; for tests and debugging.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        self.ledger.validate()
        assert self._limits.keys() <= self._ahead, "a request waits for items that were never sent to the lane"
        for content in self.ledger.contents():
            if self.ledger.state(content) is not EncodeState.READY:
                assert content in self._wanted, f"modality and size of {content} are not known"
