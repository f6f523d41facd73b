"""Define the requests of an engine's core, and the view of the engine that a driver gives it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_omni_sched.graph.order import SlaClass


@dataclass(frozen=True, slots=True)
class LendingFacts:
    """Memory of an engine that `kv_lending` is about.

    ``total_blocks``: of the KV cache; ``block_tokens``: tokens of each. ``reserve_embeds``: embeddings that can be
    encoded at a time in the memory that is set aside. ``embeds_per_block``: embeddings whose activations fit into the
    memory of a block. ``step_tokens``: most tokens that a decoding request may make in a step, with its drafts.
    ``request_blocks``: of the longest request; 0 where each is compared with what is never lent when it comes.
    """

    total_blocks: int
    block_tokens: int
    reserve_embeds: int
    embeds_per_block: float
    step_tokens: int = 1
    request_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Sizes and properties of an engine that do not change while it runs.

    ``max_num_seqs``, ``max_num_batched_tokens``: of a step. ``encoder_budget_embeds``: of a step;
    ``encoder_cache_embeds``: of the encoder cache. ``encodes``: whether it has an encoder. ``paced``: whether the lane
    needs processors that decode steps leave to it, as on a CPU. ``splits_prompts``: whether a prompt may be computed
    in chunks that end before an item. ``read_ahead``: tokens behind a chunk whose embeddings a step needs, too, as with
    a drafter that predicts the token after next. ``graph_embeds``: size of the largest item that the step encodes by a
    CUDA graph; 0 without such graphs. ``lending``: None where KV blocks cannot be lent.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    encoder_budget_embeds: int
    encoder_cache_embeds: int
    encodes: bool = True
    paced: bool = False
    splits_prompts: bool = True
    read_ahead: int = 0
    graph_embeds: int = 0
    lending: LendingFacts | None = None


class PromptItem(NamedTuple):
    """Describes an item of a prompt: its ``mm_hash``, modality, embeddings, and the position of its first token.

    ``for_lane``: whether a lane can encode it, which needs its data. ``position``: among the
    request's items.
    """

    content: str
    modality: str
    embeds: int
    start: int
    for_lane: bool = True
    position: int = 0


class Prompt(Protocol):
    """A request whose prompt waits or is being computed, as a driver shows it.

    ``computed``: tokens in its KV cache; ``left``: tokens of its prompt still to compute, after a preemption including
    the output tokens made already. ``made``: output tokens. ``runs``: whether it was admitted. ``is_session``: whether
    it is a streaming session, whose prompt may grow. ``has_items``: whether it has any item, computed or not.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def computed(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def made(self) -> int: ...
    @property
    def runs(self) -> bool: ...
    @property
    def is_session(self) -> bool: ...
    @property
    def has_items(self) -> bool: ...

    def items_within(self, start: int, tokens: int) -> Iterable[PromptItem]:
        """Return the items with tokens among the ``tokens`` from position ``start``, in order."""


class Decodes(NamedTuple):
    """Decoding requests: those that got all their tokens in time, those that did not, and their least ITL target.

    The target is ``inf`` if none decodes.
    """

    unharmed: int
    broken: int
    itl_seconds: float


class KvBlocks(NamedTuple):
    """Blocks of the KV cache now: those that are neither used nor lent, and what requests still need.

    ``prompt_blocks``: for the rest of running prompts. ``running``: admitted requests, which decode or will. ``first``:
    the first waiting request that may be admitted, ``first_blocks``: for the rest of its prompt. ``blocked``: whether
    it has no room for that.
    """

    free_blocks: int
    prompt_blocks: int
    running: int
    first: Prompt | None = None
    first_blocks: int = 0
    blocked: bool = False


class EngineView(Protocol):
    """The present state of an engine, as a driver shows it.

    ``num_requests``: all that are in the engine; ``num_running``: those that were admitted. ``decode_tokens``: tokens
    that decoding requests need in the next step. ``free_embeds``: room in the encoder cache, after all evictions that
    are possible.
    """

    @property
    def num_requests(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def decode_tokens(self) -> int: ...
    @property
    def free_embeds(self) -> int: ...

    def least_itl(self) -> float | None:
        """Return the least inter-token-latency target of running requests; None if none runs."""

    def decodes(self) -> Decodes:
        """Return the decoding requests."""

    def prompts(self) -> Sequence[Prompt]:
        """Return the running requests whose prompt is being computed, in the order of admission."""

    def waiting(self, count: int) -> Sequence[Prompt]:
        """Return the first waiting requests, at most ``count``."""

    def has_encoding(self, content: str) -> bool:
        """Return whether an encoding is in the encoder cache, or in a tier from which it is restored."""


class LendingView(EngineView, Protocol):
    """The present state of an engine whose KV blocks may be lent."""

    def kv_blocks(self) -> KvBlocks:
        """Return the blocks of the KV cache."""


class RequestBook:
    """Keeps the arrival and the SLA class of each request in the engine.

    Args:
        usual: class of a request that never entered.
    """

    def __init__(self, usual: SlaClass) -> None:
        self._usual = usual
        self._entries: dict[str, tuple[float, SlaClass, int]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def enter(self, request_id: str, sla: SlaClass, arrival: float) -> None:
        """Record the arrival and the class of a request."""
        self._number += 1
        self._entries[request_id] = arrival, sla, self._number

    def leave(self, request_id: str) -> None:
        """Drop a request; unknown ones are ignored."""
        self._entries.pop(request_id, None)

    def request_ids(self) -> list[str]:
        """Return all requests in the engine."""
        return list(self._entries)

    def sla(self, request_id: str) -> SlaClass:
        """Return the class of a request."""
        entry = self._entries.get(request_id)
        return self._usual if entry is None else entry[1]

    def arrival(self, request_id: str, default: float) -> float:
        """Return when a request arrived; ``default`` if it never did."""
        entry = self._entries.get(request_id)
        return default if entry is None else entry[0]

    def deadline(self, request_id: str) -> float:
        """Return when the request's first token is due, in seconds of the clock; ``inf`` without a target."""
        entry = self._entries.get(request_id)
        return math.inf if entry is None else entry[0] + entry[1].ttft_seconds

    def in_order(self, request_ids: Iterable[str]) -> list[str]:
        """Return those of these requests that are in the engine, in the order in which they entered."""
        entries = self._entries
        return sorted((one for one in request_ids if one in entries), key=lambda one: entries[one][2])
