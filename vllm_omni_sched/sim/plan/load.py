"""Divide the requests of a trace between training and held-out time, and between replicas."""

import math
from functools import lru_cache
from typing import NamedTuple

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.work import Request
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.replay import Replay, TraceOptions
from vllm_omni_sched.sim.workloads.trace import Trace

BLOCKS = 12
"""Least number of blocks into which a trace is cut."""
_BLOCK_SECONDS = 300.0


class Part(NamedTuple):
    """Requests of one replica over ``seconds``, in order. ``blocks``: the block of each, by its position."""

    requests: tuple[Request, ...]
    blocks: tuple[int, ...]
    seconds: float


class Load:
    """The requests of a trace, for one of several replicas.

    1. The trace is cut into blocks of five minutes, or of a twelfth if it is shorter than an hour. Every other block is
       for training, those between are held out. Blocks of a part follow each other without the time between, so
       prefixes are found again within a part.
    2. Replicas get requests in turn. A replica of n gets every n-th one; which one it is counts as the seed.
    3. Requests of a trace of intervals are drawn anew for each seed.

    ``tokens``: mean tokens of a request's context when half of its answer is there. ``items``: whether requests have
    items. ``seconds``: of one part.

    Raises:
        ConfigError: one of the halves has no request.
    """

    def __init__(self, trace: Trace, options: TraceOptions) -> None:
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

    def part(self, replicas: int, seed: int, held_out: bool = False, faster: float = 1.0) -> Part:
        """Return the requests of a replica; ``faster``: factor on the rate of all."""
        found, blocks = self._halves(0 if self._exact else seed, held_out)
        kept = range(seed % replicas, len(found), replicas)
        one = [found[at] for at in kept]
        if faster != 1.0:
            one = [_at(request, request.arrival / faster) for request in one]
        return Part(tuple(one), tuple(blocks[at] for at in kept), self.seconds / faster)

    def _draw(self, seed: int, held_out: bool) -> tuple[list[Request], list[int]]:
        each = self._length / self._number
        kept, blocks = [], []
        for request in requests(self._workload, seed):
            at = min(int(request.arrival / each), self._number - 1)
            if at % 2 == held_out:
                kept.append(_at(request, max(request.arrival - (at - at // 2) * each, 0.0)))
                blocks.append(at)
        return kept, blocks


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
