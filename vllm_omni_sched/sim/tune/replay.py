"""A trace as an engine is given it, other under each seed."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.work import Request

BLOCKS = 20
"""That the requests of a trace are cut into, at least."""


def resample(
    requests: Sequence[Request], seconds: float, random: np.random.Generator, held_out: bool, block_seconds: float = 30.0
) -> Iterator[Request]:
    """Requests like those of a trace: blocks of it, drawn with replacement (block bootstrap: Künsch, 1989).

    1. Blocks are ``block_seconds`` long, or shorter where the trace has fewer than ``BLOCKS`` of them: what is
       correlated over longer times is lost.
    2. Every other block is for training, those between are held out: neither sees requests of the other.
    3. As many blocks are drawn as make half the trace.

    Raises:
        ConfigError: one of the halves has no request.
    """
    number = max(BLOCKS, math.ceil(seconds / block_seconds))
    length = seconds / number
    blocks: list[list[Request]] = [[] for _ in range(number)]
    for request in requests:
        blocks[min(int(request.arrival / length), number - 1)].append(request)
    ours = range(1 if held_out else 0, number, 2)
    if not any(blocks[at] for at in ours):
        raise ConfigError("the trace has too few requests to hold some of them out: record for longer")
    count = 0
    for place, at in enumerate(random.choice(np.asarray(ours), size=number // 2).tolist()):
        for request in blocks[at]:
            arrival = request.arrival - at * length + place * length
            yield Request(
                count,
                max(arrival, 0.0),
                request.text_tokens,
                request.output_tokens,
                request.items,
                request.sla,
                request.client,
            )
            count += 1
