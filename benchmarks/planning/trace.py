"""Make up an hour in the format of Mooncake's traces, with the statistics of its conversations."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import numpy as np

from benchmarks.serve.workloads import STATISTICS
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.registry import build

RATE = 12_031 / 3_537.0
"""Requests a second of Mooncake's conversations."""
_BLOCK = 512
_RECENT = 1_000
_LOOKED_AT = 6
_CONTINUED = 0.7  # of the requests begin with the prompt of a recent one that is shorter


def write(path: Path, seconds: float, rate: float, seed: int) -> None:
    """Write requests of so many seconds; arrivals and sizes are drawn from the statistics.

    How prompts share prefixes is made up: Mooncake's authors say that 40 % of the blocks of conversations were seen
    before, and so are about as many of these.
    """
    load = build({"kind": "statistics", "file": str(STATISTICS / "mooncake-conversation.json"), "rate": rate})
    rng = np.random.default_rng((seed, 11))
    recent: list[list[int]] = []
    used = 0
    with path.open("w") as file:
        for request in takewhile(lambda one: one.arrival < seconds, requests(load, seed)):
            number = -(-request.text_tokens // _BLOCK)
            before: list[int] = []
            if recent and rng.random() < _CONTINUED:
                some = (recent[at] for at in rng.integers(0, len(recent), _LOOKED_AT))
                before = max((one for one in some if len(one) <= number), key=len, default=[])
            ids = before + list(range(used, used + number - len(before)))
            used += number - len(before)
            recent = [*recent[1 - _RECENT :], ids]
            row = {
                "timestamp": round(1e3 * request.arrival),
                "input_length": max(request.text_tokens, 1),
                "output_length": request.output_tokens,
                "hash_ids": ids,
            }
            file.write(json.dumps(row) + "\n")
