"""Divide the requests of a trace between training and held-out time, and between replicas."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.work import Request
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.replay import Replay, TraceOptions
from vllm_omni_sched.sim.workloads.trace import Trace

BLOCKS = 12
"""Least number of blocks into which a trace is cut."""
_BLOCK_SECONDS = 300.0


@dataclass(frozen=True)
class Patience:
    """How long clients wait for a first token before they give up.

    Between ``low`` and ``high`` seconds, evenly, by the number of the request: the same client has the same patience
    whatever serves it.
    """

    low: float
    high: float

    def seconds(self, number: int) -> float:
        """Return the seconds that the client of a request waits."""
        if self.low == self.high:
            return self.low
        return float(np.random.default_rng((1, number)).uniform(self.low, self.high))


class Part(NamedTuple):
    """Requests of one replica over ``seconds``, in order. ``blocks``: the block of each, by its position.

    ``patience``: of their clients; None: they wait for ever.
    """

    requests: tuple[Request, ...]
    blocks: tuple[int, ...]
    seconds: float
    patience: Patience | None = None


class Work(NamedTuple):
    """What engines compute at least for the training requests, if they forget no prefix.

    ``tokens``, ``pairs``: of prompts, and pairs of a query and a key. ``outputs``: tokens after the first ones, which
    read ``reads`` keys in all.
    """

    tokens: int
    pairs: float
    outputs: int
    reads: float


class Load:
    """The requests of a trace, for one of several replicas.

    1. The trace is cut into blocks of five minutes, or of a twelfth if it is shorter than an hour. Every other block is
       for training, those between are held out. Blocks of a part follow each other without the time between, so
       prefixes are found again within a part.
    2. Replicas get requests in turn. A replica of n gets every n-th one; which one it is counts as the seed.
    3. Requests of a trace of intervals are drawn anew for each seed.
    4. With ``patience`` clients give up; those of a faster load have the same patience.

    ``tokens``: mean tokens of a request's context when half of its answer is there. ``items``: whether requests have
    items. ``seconds``: of one part. ``work``: of the training part.

    Raises:
        ConfigError: one of the halves has no request.
    """

    def __init__(self, trace: Trace, options: TraceOptions, patience: Patience | None = None) -> None:
        self.patience = patience
        self._workload, self._exact = Replay(trace, options), bool(trace.requests)
        self._length = trace.arrivals / self._workload.rate
        self._number = max(BLOCKS, 2 * math.ceil(self._length / _BLOCK_SECONDS / 2))
        self.seconds = self._length / 2
        self.source = self._workload.source
        self._halves = lru_cache(maxsize=8)(self._draw)
        for held_out in (False, True):
            if not self._halves(0, held_out)[0]:
                raise ConfigError("the trace has too few requests to hold some of them out: record for longer")
        every = [one for held_out in (False, True) for one in self._halves(0, held_out)[0]]
        self.tokens = sum(one.prompt_tokens + one.output_tokens / 2 for one in every) / len(every)
        self.prompt_tokens = sum(one.prompt_tokens for one in every) / len(every)
        self.output_tokens = sum(one.output_tokens for one in every) / len(every)
        self.longest = max(one.prompt_tokens + one.output_tokens for one in every)
        self.items = any(one.items for one in every)
        self.blocks = any(one.blocks for one in every)
        self.rate = len(every) / (2 * self.seconds)
        self.work = _work(self._halves(0, False)[0])

    def part(self, replicas: int, seed: int, held_out: bool = False, faster: float = 1.0) -> Part:
        """Return the requests of a replica; ``faster``: factor on the rate of all."""
        found, blocks = self._halves(0 if self._exact else seed, held_out)
        kept = range(seed % replicas, len(found), replicas)
        one = [found[at] for at in kept]
        if faster != 1.0:
            one = [_at(request, request.arrival / faster) for request in one]
        return Part(tuple(one), tuple(blocks[at] for at in kept), self.seconds / faster, self.patience)

    def _draw(self, seed: int, held_out: bool) -> tuple[list[Request], list[int]]:
        each = self._length / self._number
        kept, blocks = [], []
        for request in requests(self._workload, seed):
            at = min(int(request.arrival / each), self._number - 1)
            if at % 2 == held_out:
                kept.append(_at(request, max(request.arrival - (at - at // 2) * each, 0.0)))
                blocks.append(at)
        return kept, blocks


def _work(every: list[Request]) -> Work:
    seen: set[int] = set()
    tokens, pairs, outputs, reads = 0, 0.0, 0, 0.0
    for request in every:
        known = 0
        while known < len(request.blocks) and request.blocks[known] in seen:
            known += 1
        seen.update(request.blocks)
        begin = min(known * request.block_tokens, request.prompt_tokens - 1)
        new, output = request.prompt_tokens - begin, request.output_tokens - 1
        tokens += new
        pairs += new * (begin + new / 2)
        outputs += output
        reads += output * (request.prompt_tokens + output / 2)
    return Work(tokens, pairs, outputs, reads)


def _at(request: Request, arrival: float) -> Request:
    return Request(
        request.number,
        arrival,
        request.text_tokens,
        request.output_tokens,
        request.items,
        request.sla,
        request.client,
        request.priority,
        request.blocks,
        request.block_tokens,
    )
