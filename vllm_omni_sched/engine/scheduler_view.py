"""Shows vLLM's scheduler to the core (`EngineView`), and its requests (`Prompt`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched import compat
from vllm_omni_sched.core.engine.requests import Decodes, KvBlocks, PromptItem, RequestBook
from vllm_omni_sched.items import FeatureList

_FOR_BLOCKS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""What a request is while it waits for nothing but room."""


def prompt_tokens_of(output: SchedulerOutput) -> int:
    """Return the prompt tokens of a step: all tokens of requests that have more than a decode's one token or drafts."""
    drafted = output.scheduled_spec_decode_tokens
    return sum(
        tokens
        for request_id, tokens in output.num_scheduled_tokens.items()
        if tokens > 1 and not (drafted and request_id in drafted)
    )


def blocks_left(request: Request, block_tokens: int) -> int:
    """Return the KV blocks of so many tokens each that a request needs for the rest of its prompt."""
    return int(-(-request.num_tokens // block_tokens) + -request.num_computed_tokens // block_tokens)


class RequestPrompt:
    """A request of vLLM as the core sees it; only items of a `FeatureList` are shown, which can be searched.

    ``content_of``: returns what the core knows an item by, which has so many embeddings; None: its identifier.
    """

    __slots__ = ("content_of", "request")

    def __init__(self, request: Request, content_of: Callable[[Any, int], str] | None = None) -> None:
        self.request, self.content_of = request, content_of

    @property
    def request_id(self) -> str:
        request_id: str = self.request.request_id
        return request_id

    @property
    def computed(self) -> int:
        return int(self.request.num_computed_tokens)

    @property
    def left(self) -> int:
        return int(self.request.num_tokens - self.request.num_computed_tokens)

    @property
    def made(self) -> int:
        return int(self.request.num_output_tokens)

    @property
    def runs(self) -> bool:
        return bool(self.request.status == RequestStatus.RUNNING)

    @property
    def is_session(self) -> bool:
        return bool(self.request.resumable)

    @property
    def has_items(self) -> bool:
        return bool(self.request.mm_features)

    def items_within(self, start: int, tokens: int) -> Iterator[PromptItem]:
        features = self.request.mm_features
        if not isinstance(features, FeatureList) or not features.ends_after(start):
            return
        for i in features.spans.overlapping(start, start + tokens):
            yield self.item(i)

    def item(self, i: int) -> PromptItem:
        """Return one item by its position among the request's items."""
        feature, num_embeds = self.request.mm_features[i], self.request.get_num_encoder_embeds(i)
        return PromptItem(
            feature.identifier if self.content_of is None else self.content_of(feature, num_embeds),
            feature.modality,
            num_embeds,
            feature.mm_position.offset,
            for_lane(feature.modality, feature.data),
            i,
        )


def for_lane(modality: str, data: Mapping[str, Any] | None) -> bool:
    """Return whether a lane can encode an item with this processed data (None: it was sent without any).

    Data in shared memory belongs to the workers. Embeddings that the client sent need no encoder, or are on their way
    to vLLM's own EC connector, if they are announced without a tensor.
    """
    return (
        data is not None and "address" not in data and modality != "prompt_embeds" and f"{modality}_embeds" not in data
    )


class SchedulerView:
    """vLLM's scheduler as the core sees it.

    1. `look` reads the running requests once for a step; prompts and decodes are those of the last look.
    2. The least latency target is added up as requests are admitted, and read anew after a step or when one leaves.

    ``waits``: whether a request waits for the lane; None without a lane. ``identifiers``: those of contents that have
    another name for the lane.
    """

    def __init__(self, scheduler: Any, book: RequestBook) -> None:
        self._scheduler, self._book = scheduler, book
        self._prompts: list[RequestPrompt] = []
        self._decoding: list[Request] = []
        self.decode_tokens = 0
        self.waits: Callable[[str], bool] | None = None  # for the lane
        self.identifiers: Mapping[str, str] = {}
        self._targets_read, self._least = 0, inf  # of so many running requests
        self._late: set[str] = set()  # decoding requests that had an inter-token gap above their target
        self._last = 0.0  # when the tokens of the last step were out

    def changed(self) -> None:
        """Forget what was read of the running requests, at the begin and the end of a step."""
        self._targets_read, self._least = 0, inf

    def look(self) -> None:
        """Read the running requests, before a step is planned."""
        self._prompts, self._decoding, tokens = [], [], 0
        for request in self._scheduler.running:
            computed = request.num_computed_tokens
            # more than one token is left of a preempted request whose own output is computed again
            if computed < request.num_prompt_tokens or request.num_tokens - computed > 1:
                self._prompts.append(RequestPrompt(request))
            else:
                self._decoding.append(request)
                tokens += 1 + len(request.spec_token_ids)
        self.decode_tokens = tokens

    @property
    def num_requests(self) -> int:
        return len(self._scheduler.requests)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def free_embeds(self) -> int:
        return int(self._scheduler.encoder_cache_manager.num_freeable_slots)

    def least_itl(self) -> float | None:
        running = self._scheduler.running
        if not running:
            return None
        if self._targets_read > len(running):
            self.changed()
        for request in islice(running, self._targets_read, None):
            self._least = min(self._least, self._book.sla(request.request_id).itl_seconds)
        self._targets_read = len(running)
        return self._least

    def decodes(self) -> Decodes:
        broken = sum(request.request_id in self._late for request in self._decoding)
        least = min((self._book.sla(request.request_id).itl_seconds for request in self._decoding), default=inf)
        return Decodes(len(self._decoding) - broken, broken, least)

    def prompts(self) -> Sequence[RequestPrompt]:
        return self._prompts

    def waiting(self, count: int) -> Sequence[RequestPrompt]:
        return [RequestPrompt(request) for request in islice(iter(self._scheduler.waiting), count)]

    def kv_blocks(self) -> KvBlocks:
        """Return the blocks of the KV cache, by the last look at the running requests.

        The first waiting request is the first one that does not wait for the lane. vLLM admits it if the pool has room
        for all of it, and for its watermark while others run.
        """
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        size, free = scheduler.block_size, manager.block_pool.get_num_free_blocks()
        prompts = sum([blocks_left(prompt.request, size) for prompt in self._prompts])
        first = None
        if len(scheduler.running) < getattr(scheduler, compat.admission_limit(scheduler)):
            first = next(filter(self._needs_blocks, compat.waiting_requests(scheduler)), None)
        if first is None:
            return KvBlocks(free, prompts, len(scheduler.running))
        needs = blocks_left(first, size)
        keeps_free = getattr(manager, "watermark_blocks", 0) if scheduler.running else 0
        blocked = needs + keeps_free > free - prompts
        return KvBlocks(free, prompts, len(scheduler.running), RequestPrompt(first), needs, blocked)

    def _needs_blocks(self, request: Request) -> bool:
        return request.status in _FOR_BLOCKS and not (self.waits is not None and self.waits(request.request_id))

    def has_encoding(self, content: str) -> bool:
        connector, mm_hash = getattr(self._scheduler, "ec_connector", None), self.identifiers.get(content, content)
        return mm_hash in self._scheduler.encoder_cache_manager.cached or (
            connector is not None and connector.has_cache_item(mm_hash)
        )

    def tokens_out(self, now: float) -> None:
        """Note which decoding requests had to wait for longer than their target for the tokens of this step."""
        gap, self._last = now - self._last, now
        for request in self._scheduler.running:
            # the first token of a request ends no gap
            if request.num_output_tokens > 1 and gap > self._book.sla(request.request_id).itl_seconds:
                self._late.add(request.request_id)

    def leave(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._late.discard(request_id)
        self.changed()
