"""OmniEncoderCacheManager against vLLM's own: the same answers and evictions, and its books balanced after each
operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager

from vllm_omni_sched import OmniEncoderCacheManager
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.encoder.cache import manager_for
from vllm_omni_sched.testing import make_item, make_request

NUM_REQUESTS = 4
NUM_ITEMS = 6
SIZES = (1, 2, 3, 5)
"""Embeddings by content: item `hash-2` always has `SIZES[2]`."""

requests_ = st.integers(0, NUM_REQUESTS - 1)
items = st.integers(0, NUM_ITEMS - 1)
contents = st.lists(st.integers(0, len(SIZES) - 1), min_size=NUM_ITEMS, max_size=NUM_ITEMS)


def request_of(number: int, kinds: list[int]) -> Any:
    features, offset = [], 0
    for kind in kinds:
        features.append(make_item(offset, SIZES[kind], f"hash-{kind}", data=None))
        offset += SIZES[kind]
    return make_request(f"r{number}", offset, features)


class Cache(RuleBasedStateMachine):
    """Operations in the order in which the scheduler issues them for one item: look up, make room, allocate; later
    release."""

    @initialize(
        cache_size=st.sampled_from([5, 8, 20]), kinds=st.lists(contents, min_size=NUM_REQUESTS, max_size=NUM_REQUESTS)
    )
    def start(self, cache_size: int, kinds: list[list[int]]) -> None:
        self.stock = EncoderCacheManager(cache_size)
        self.ours = OmniEncoderCacheManager(cache_size)
        self.requests = [request_of(number, of_one) for number, of_one in enumerate(kinds)]

    def both(self, name: str, *args: Any) -> Any:
        stock, ours = getattr(self.stock, name)(*args), getattr(self.ours, name)(*args)
        assert stock == ours
        return ours

    @rule(request=requests_, item=items, budget=st.integers(0, 9))
    def schedule(self, request: int, item: int, budget: int) -> None:
        one = self.requests[request]
        if self.both("check_and_update_cache", one, item):
            return
        if self.both("can_allocate", one, item, budget, 0):
            self.both("allocate", one, item)

    @rule(request=requests_, item=items)
    def consume(self, request: int, item: int) -> None:
        """Also an item that was never held, or is released twice: both are no-ops."""
        self.both("free_encoder_input", self.requests[request], item)

    @rule(request=requests_)
    def finish(self, request: int) -> None:
        self.both("free", self.requests[request])

    @rule()
    def end_of_step(self) -> None:
        self.both("get_freed_mm_hashes")

    @rule()
    def reset(self) -> None:
        self.both("reset")

    @invariant()
    def balanced_and_as_stock(self) -> None:
        if not hasattr(self, "ours"):
            return
        self.ours.validate()
        for name in ("num_free_slots", "num_freeable_slots", "cached"):
            assert getattr(self.stock, name) == getattr(self.ours, name), name
        assert list(self.stock.freeable.items()) == list(self.ours.freeable.items())
        for request in self.requests:
            assert self.stock.get_cached_input_ids(request) == self.ours.get_cached_input_ids(request)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@dataclass
class CountingRequest:
    """Counts how often its items are looked at."""

    request: Any
    looked_at: list[int] = field(default_factory=list)

    @property
    def mm_features(self) -> Any:
        counting = self

        class Items(list):  # type: ignore[type-arg]
            def __getitem__(self, index: Any) -> Any:
                counting.looked_at.append(index)
                return super().__getitem__(index)

        return Items(self.request.mm_features)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


@pytest.mark.parametrize("num_items", [100, 2_000])
def test_releasing_an_item_looks_at_no_other(num_items: int) -> None:
    request = make_request("r", num_items, [make_item(i, 1, f"hash-{i}", data=None) for i in range(num_items)])
    manager = OmniEncoderCacheManager(num_items)
    for item in range(num_items):
        assert manager.can_allocate(request, item, num_items, 0)
        manager.allocate(request, item)
    counting = CountingRequest(request)
    for item in range(10):
        manager.free_encoder_input(counting, item)
    assert set(counting.looked_at) == set(range(10))
    assert len(counting.looked_at) <= 30
    manager.validate()


class CountedEntries(dict):  # type: ignore[type-arg]
    """Entries of a cache that may be looked up, and not walked."""

    def items(self) -> Any:
        raise AssertionError("all entries were walked")

    __iter__ = values = keys = items  # type: ignore[assignment]


@pytest.mark.parametrize("release_held_first", [False, True])
def test_releasing_what_is_not_held_walks_no_entries(release_held_first: bool) -> None:
    request = make_request("r", 8, [make_item(i, 1, f"hash-{i}", data=None) for i in range(8)])
    manager = OmniEncoderCacheManager(8)
    for item in range(4):
        assert manager.can_allocate(request, item, 8, 0)
        manager.allocate(request, item)
    entries = manager.cached = CountedEntries(manager.cached)
    for item in (0, 0, 7) if release_held_first else (7,):
        manager.free_encoder_input(request, item)
    manager.cached = dict(dict.items(entries))
    assert set(manager.freeable) == ({"hash-0"} if release_held_first else set())
    manager.validate()


def test_entries_made_are_told_from_those_here_and_those_gone() -> None:
    """Evicted ones that no worker has been told of yet, and those of before a reset, included."""
    requests = [make_request(f"r{n}", 1, [make_item(0, 1, f"hash-{n}", data=None)]) for n in range(5)]
    manager = OmniEncoderCacheManager(2)
    for made, request in enumerate(requests, 1):
        assert not manager.check_and_update_cache(request, 0)
        assert manager.can_allocate(request, 0, 1, 0)
        manager.allocate(request, 0)
        assert manager.allocated == made
        manager.free(request)
    assert len(manager.get_freed_mm_hashes()) == manager.evictions == 3
    assert manager.allocated == manager.misses == 5
    manager.reset()
    assert manager.allocated == 5


class ModelConfig:
    is_encoder_decoder = False


class EncoderDecoderConfig(ModelConfig):
    is_encoder_decoder = True


class OfTheOperator(EncoderCacheManager):
    pass


WITH_HOST = OmniSchedConfig(encode_ahead=True, encoder_cache_host_bytes=1)


@pytest.mark.parametrize("config", [OmniSchedConfig(), WITH_HOST], ids=["default", "host"])
def test_ours_takes_the_place_of_vllms_own_manager(config: OmniSchedConfig) -> None:
    ours = manager_for(EncoderCacheManager(7), config, ModelConfig)
    assert (type(ours), ours.cache_size) == (OmniEncoderCacheManager, 7)


def test_an_encoder_decoder_model_has_no_host_tier() -> None:
    """Whatever the operator has named: that model is the reason."""
    for manager in (EncoderDecoderCacheManager(7), EncoderCacheManager(7), OfTheOperator(7)):
        with pytest.raises(ConfigError, match="because this is an encoder-decoder model") as refused:
            manager_for(manager, WITH_HOST, EncoderDecoderConfig)
        assert "--ec-manager-config" not in str(refused.value)
    untouched = EncoderDecoderCacheManager(7)
    assert manager_for(untouched, OmniSchedConfig(), EncoderDecoderConfig) is untouched


def test_an_operators_own_manager_is_not_replaced() -> None:
    operators = OfTheOperator(7)
    assert manager_for(operators, OmniSchedConfig(), ModelConfig) is operators
    with pytest.raises(ConfigError, match="not OfTheOperator: leave 'encoder_cache_host_bytes' out"):
        manager_for(operators, WITH_HOST, ModelConfig)
