"""The replay of `benchmarks.encoder_cache`: its traces repeat, its counts add up, and age is stock."""

from __future__ import annotations

import pytest

from benchmarks.encoder_cache import VARIANTS
from benchmarks.encoder_cache.replay import Counts, Replay
from benchmarks.encoder_cache.trace import MIXES, requests


def trace(mix: str, seed: int = 3):
    return requests(MIXES[mix], 150, 1.0, seed)


def test_a_seed_is_a_trace():
    assert trace("catalogue") == trace("catalogue") != trace("catalogue", seed=4)


@pytest.fixture(scope="module", params=list(MIXES))
def counts(request) -> dict[str, Counts]:
    asked = trace(request.param)
    found = {}
    for variant in VARIANTS:
        replay = Replay(variant, 32768, 1 << 30)
        found[variant] = replay.run(asked)
        if variant != "stock":
            replay.manager.validate()
    found["lookups"] = sum(len(one.items) for one in asked)
    return found


def test_every_item_is_found_somewhere_or_encoded_or_has_no_room(counts):
    for variant in VARIANTS:
        one = counts[variant]
        assert one.device + one.host + one.miss + one.full == counts["lookups"]


def test_by_age_it_is_stock(counts):
    assert counts["age"] == counts["stock"]
    assert counts["stock"].miss > 0


def test_a_host_tier_encodes_less(counts):
    assert counts["worth + host"].host > 0
    assert counts["worth + host"].encode_seconds < counts["worth, measured"].encode_seconds
    assert counts["worth, measured"].host == 0
