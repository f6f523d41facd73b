"""WorthEncoderCacheManager: its books balance, and each victim is the one worth least of those that may go."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager

from vllm_omni_sched import OmniEncoderCacheManager
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import EvictionOrder, OmniSchedConfig
from vllm_omni_sched.engine.encoder.worth import WorthEncoderCacheManager, manager_for, refuse_encoder_decoder
from vllm_omni_sched.testing import make_item, make_request

SIZES = (1, 2, 3, 5)
NUM_REQUESTS, NUM_ITEMS = 4, 5
HALF_LIFE_SECONDS = 30.0
contents = st.lists(st.integers(0, len(SIZES) - 1), min_size=NUM_ITEMS, max_size=NUM_ITEMS)


class Model:
    """Counts uses and costs of each content for itself, and ranks by them."""

    def __init__(self) -> None:
        self.uses: dict[str, list[float]] = {}  # times, of what is cached or was before
        self.cost: dict[str, float] = {}

    def rank(self, mm_hash: str, size: int, now: float) -> float:
        count = sum(2 ** ((at - now) / HALF_LIFE_SECONDS) for at in self.uses[mm_hash])
        return count * self.cost[mm_hash] / size


class ByWorth(RuleBasedStateMachine):
    @initialize(
        cache_size=st.sampled_from([5, 8, 12]), kinds=st.lists(contents, min_size=NUM_REQUESTS, max_size=NUM_REQUESTS)
    )
    def start(self, cache_size: int, kinds: list[list[int]]) -> None:
        self.now = 0.0
        self.manager = WorthEncoderCacheManager(cache_size, clock=lambda: self.now, half_life_seconds=HALF_LIFE_SECONDS)
        self.model = Model()
        self.requests = []
        for number, of_one in enumerate(kinds):
            features, offset = [], 0
            for kind in of_one:
                modality = ("image", "audio")[kind % 2]
                features.append(make_item(offset, SIZES[kind], f"hash-{kind}", data=None, modality=modality))
                offset += SIZES[kind]
            self.requests.append(make_request(f"r{number}", offset, features))

    @rule(request=st.integers(0, NUM_REQUESTS - 1), item=st.integers(0, NUM_ITEMS - 1))
    def schedule(self, request: int, item: int) -> None:
        one, manager = self.requests[request], self.manager
        mm_hash = one.mm_features[item].identifier
        held_before = one.request_id in manager.cached.get(mm_hash, ())
        if manager.check_and_update_cache(one, item):
            if not held_before:
                self.used(one, item)
            return
        candidates = dict(manager.freeable)
        already = list(manager.freed)
        if manager.can_allocate(one, item, 100, 0):
            self.check_victims(candidates, manager.freed[len(already) :])
            manager.allocate(one, item)
            self.used(one, item)

    def used(self, request: Any, item: int) -> None:
        feature = request.mm_features[item]
        self.model.uses.setdefault(feature.identifier, []).append(self.now)
        size = request.get_num_encoder_embeds(item)
        self.model.cost[feature.identifier] = self.manager.cost.seconds(feature.modality, size)

    def check_victims(self, candidates: dict[str, int], victims: list[str]) -> None:
        for victim in victims:
            worth = {h: self.model.rank(h, size, self.now) for h, size in candidates.items()}
            assert worth[victim] <= min(worth.values()) * (1 + 1e-9)
            del candidates[victim]

    @rule(request=st.integers(0, NUM_REQUESTS - 1), item=st.integers(0, NUM_ITEMS - 1))
    def consume(self, request: int, item: int) -> None:
        self.manager.free_encoder_input(self.requests[request], item)

    @rule(request=st.integers(0, NUM_REQUESTS - 1))
    def finish(self, request: int) -> None:
        self.manager.free(self.requests[request])

    @rule(seconds=st.sampled_from([1.0, 100.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(modality=st.sampled_from(["image", "audio"]), seconds=st.sampled_from([0.5, 1.0, 8.0]))
    def measure(self, modality: str, seconds: float) -> None:
        self.manager.cost.observe(modality, 1, seconds)

    @rule()
    def end_of_step(self) -> None:
        self.manager.get_freed_mm_hashes()

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.model = Model()

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "manager"):
            self.manager.validate()


TestByWorth = ByWorth.TestCase
TestByWorth.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def cycle(manager: Any, *names: str) -> None:
    """One request after the other takes an item of one embedding and lets go."""
    for name in names:
        request = make_request(f"r-{name}", 1, [make_item(0, 1, name, data=None)])
        if not manager.check_and_update_cache(request, 0):
            assert manager.can_allocate(request, 0, 1, 0)
            manager.allocate(request, 0)
        manager.free(request)


def test_chunks_of_one_request_are_one_use():
    manager = WorthEncoderCacheManager(2, clock=lambda: 0.0)
    request = make_request("r", 1, [make_item(0, 1, "a", data=None)])
    assert manager.can_allocate(request, 0, 1, 0)
    manager.allocate(request, 0)
    for _ in range(9):
        assert manager.check_and_update_cache(request, 0)
    manager.free(request)
    cycle(manager, "b", "b", "c")
    assert set(manager.cached) == {"b", "c"}


def test_what_was_evicted_is_told_only_to_who_asks_for_it():
    manager = WorthEncoderCacheManager(1, clock=lambda: 0.0)
    cycle(manager, "a", "b")
    assert manager.take_evicted() == {}
    manager.tells_evicted = True
    cycle(manager, "c", "d")
    assert set(manager.take_evicted()) == {"b", "c"}
    assert manager.take_evicted() == {}


def test_only_the_first_freeable_entry_can_be_taken():
    manager = WorthEncoderCacheManager(1)
    with pytest.raises(KeyError, match="first"):
        manager.freeable.popitem(last=False)
    cycle(manager, "a")
    with pytest.raises(KeyError, match="first"):
        manager.freeable.popitem()


class ModelConfig:
    is_encoder_decoder = False
    dtype = type("dtype", (), {"itemsize": 2})

    @staticmethod
    def get_inputs_embeds_size() -> int:
        return 128


class EncoderDecoderConfig(ModelConfig):
    is_encoder_decoder = True


class OfTheOperator(EncoderCacheManager):
    pass


BY_WORTH = OmniSchedConfig(encoder_cache_order=EvictionOrder.WORTH)
WITH_HOST = OmniSchedConfig(encode_ahead=True, encoder_cache_host_bytes=1)


def test_the_manager_that_the_options_ask_for():
    default = manager_for(EncoderCacheManager(7), OmniSchedConfig(), ModelConfig)
    assert (type(default), default.cache_size) == (OmniEncoderCacheManager, 7)
    operators = OfTheOperator(7)
    assert manager_for(operators, OmniSchedConfig(), ModelConfig) is operators
    for config, order in ((BY_WORTH, EvictionOrder.WORTH), (WITH_HOST, EvictionOrder.AGE)):
        ours = manager_for(EncoderCacheManager(7), config, ModelConfig)
        assert (type(ours), ours.cache_size, ours.order) == (WorthEncoderCacheManager, 7, order)
        assert ours.embed_bytes == 256


@pytest.mark.parametrize("config", [BY_WORTH, WITH_HOST], ids=["order", "host"])
def test_an_encoder_decoder_model_has_no_such_cache(config):
    """Whatever the operator has named: that model is the reason."""
    for manager in (EncoderDecoderCacheManager(7), EncoderCacheManager(7), OfTheOperator(7)):
        with pytest.raises(ConfigError, match="because this is an encoder-decoder model") as refused:
            manager_for(manager, config, EncoderDecoderConfig)
        assert "--ec-manager-config" not in str(refused.value)
    with pytest.raises(ConfigError, match="because this is an encoder-decoder model"):
        refuse_encoder_decoder(config, EncoderDecoderConfig)
    untouched = EncoderDecoderCacheManager(7)
    assert manager_for(untouched, OmniSchedConfig(), EncoderDecoderConfig) is untouched


@pytest.mark.parametrize("config", [BY_WORTH, WITH_HOST], ids=["order", "host"])
def test_an_operators_own_manager_is_not_replaced(config):
    with pytest.raises(ConfigError, match="of vllm-omni-sched, not OfTheOperator: leave 'encoder_cache_"):
        manager_for(OfTheOperator(7), config, ModelConfig)


def test_worth_is_of_seconds_that_were_measured():
    manager = WorthEncoderCacheManager(8, clock=lambda: 0.0)
    before = manager.cost.seconds("image", 3)
    manager.cost.observe("image", 10, 5.0)
    assert math.isclose(manager.cost.seconds("image", 3), 1.5)
    assert before != 1.5
