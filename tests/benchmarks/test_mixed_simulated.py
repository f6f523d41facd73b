"""The load of `benchmarks/mixed` as the simulator has it, against the benchmark's own."""

import numpy as np
import pytest

from benchmarks.mixed.workload import arrivals
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.registry import build


def test_the_mixed_load_is_that_of_the_benchmark():
    theirs = arrivals(1.0, 5000.0, 1)
    ours = list(takewhile_until(5000.0, requests(build({"kind": "mixed", "rate": 2.4, "embeds": 9}), 1)))
    for kind in ("text", "image"):
        one = [a for a in theirs if a.kind == kind]
        other = [a for a in ours if a.modality == kind]
        assert len(other) == pytest.approx(len(one), rel=0.15)
        assert np.mean([a.text_tokens for a in other]) == pytest.approx(
            np.mean([a.prompt_words for a in one]) + 1, rel=0.03
        )
        assert np.mean([a.output_tokens for a in other]) == pytest.approx(
            np.mean([a.output_tokens for a in one]), rel=0.03
        )
        sizes = [
            np.bincount([len(a) for a in b], minlength=10) / len(b)
            for b in ([a.items for a in other], [a.image_seeds for a in one])
        ]
        assert sizes[0] == pytest.approx(sizes[1], abs=0.03)
    assert {item.embeds for a in ours for item in a.items} == {9}


def takewhile_until(end, stream):
    for one in stream:
        if one.arrival >= end:
            return
        yield one
