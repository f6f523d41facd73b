"""Lending KV blocks on modelled memory and on real memory: the same events give the same loans, and nothing is lost.

The real one is vLLM's own block pool over memory of this process, whose pages are given back while blocks are lent.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.engine.lending.blocks import LentBlocks
from vllm_omni_sched.engine.lending.pages import KvPages, Layer, kv_pages_of
from vllm_omni_sched.resource.engine.lending import EncodeDemand, LendingSnapshot, MemoryLending

TOTAL, LAYERS, BLOCK = 24, 2, 3 * mmap.PAGESIZE
SETTINGS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


class Modelled:
    """Keeps a KV cache as the simulator does: as numbers."""

    def __init__(self) -> None:
        self._requests: list[int] = []
        self._lent = 0

    @property
    def free(self) -> int:
        return TOTAL - self._lent - sum(self._requests)

    def begin(self, blocks: int) -> None:
        self._requests.append(blocks)

    def end(self) -> None:
        self._requests.pop(0)

    def resize(self, blocks: int) -> None:
        self._lent = blocks

    def check(self) -> None:
        assert self.free >= 0


class Real:
    """vLLM's block pool, and memory in which every request has written its number."""

    def __init__(self) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool = BlockPool(TOTAL + 1, True, 16)  # one is the null block
        self.lent = LentBlocks(self.pool)
        self._memory = mmap.mmap(-1, LAYERS * (TOTAL + 1) * BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self._memory, dtype=np.uint8).reshape(LAYERS, TOTAL + 1, BLOCK)
        each = (TOTAL + 1) * BLOCK
        self.pages = KvPages([Layer(self.bytes.ctypes.data + at * each, BLOCK, TOTAL + 1) for at in range(LAYERS)])
        self.bytes[:] = 255
        self._requests: list[tuple[int, list[Any]]] = []
        self._number = 0

    @property
    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def begin(self, blocks: int) -> None:
        self._number = self._number % 200 + 1
        taken = self.pool.get_new_blocks(blocks)
        for one in taken:
            self.bytes[:, one.block_id] = self._number
        self._requests.append((self._number, taken))

    def end(self) -> None:
        _, blocks = self._requests.pop(0)
        self.pool.free_blocks(reversed(blocks))

    def resize(self, blocks: int) -> None:
        self.lent.resize(blocks)
        new = self.lent.take_new()
        assert self.pages.give_back(new) == LAYERS * len(new) * BLOCK
        assert resident(self.pages, new) == 0

    def check(self) -> None:
        held = {one.block_id for _, blocks in self._requests for one in blocks}
        assert not held & set(self.lent.block_ids)
        assert self.free + len(held) + len(self.lent) == TOTAL
        for number, blocks in self._requests:
            for one in blocks:
                assert (self.bytes[:, one.block_id] == number).all(), "a request has lost what it wrote"


def resident(pages: KvPages, block_ids: Any) -> int:
    """Return how many pages of these blocks are in memory."""
    found, mincore = 0, ctypes.CDLL(None).mincore
    for address, length in pages.ranges(block_ids):
        seen = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
        assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), seen) == 0
        found += sum(one & 1 for one in seen)
    return found


@dataclass
class Engine:
    """Admits requests with free blocks alone, and lends by the policy."""

    memory: Any
    policy: MemoryLending = field(default_factory=lambda: MemoryLending(0.5, hold_seconds=0.5, patience_seconds=1.0))
    waiting: list[int] = field(default_factory=list)
    running: int = 0
    demands: list[int] = field(default_factory=list)
    used: int = 0
    lent: int = 0
    now: float = 0.0
    plans: list[Any] = field(default_factory=list)

    def step(self) -> None:
        self.now += 0.2
        blocked = bool(self.waiting) and self.waiting[0] > self.memory.free
        demands = [EncodeDemand(one) for one in self.demands[:1]] if not self.used else []
        snapshot = LendingSnapshot(TOTAL, self.memory.free, self.lent, self.used, 0, demands, blocked)
        plan = self.policy.plan(snapshot, self.now)
        self.plans.append((plan, self.memory.free))
        self.lent = plan.blocks
        self.memory.resize(plan.blocks)
        if plan.begins:
            self.used = self.demands.pop(0)
        while plan.admits and self.waiting and self.waiting[0] <= self.memory.free:
            self.memory.begin(self.waiting.pop(0))
            self.running += 1
        self.memory.check()

    def do(self, event: tuple[str, int]) -> None:
        what, blocks = event
        if what == "request":
            self.waiting.append(blocks)
        elif what == "end" and self.running:
            self.memory.end()
            self.running -= 1
        elif what == "demand":
            self.demands.append(blocks)
        elif what == "encoded":
            self.used = 0
        self.step()


EVENTS = st.one_of(
    st.tuples(st.just("request"), st.integers(1, TOTAL)),
    st.tuples(st.just("demand"), st.integers(1, TOTAL // 2)),
    st.tuples(st.sampled_from(["end", "encoded", "tick"]), st.just(0)),
)


@SETTINGS
@given(st.lists(EVENTS, max_size=60))
def test_both_lend_the_same_and_requests_keep_their_blocks(events: list[tuple[str, int]]) -> None:
    modelled, real = Engine(Modelled()), Engine(Real())
    for event in events:
        modelled.do(event)
        real.do(event)
    while real.running or real.waiting or real.demands or real.used or real.lent:
        for one in (modelled, real):
            one.do(("end", 0))
            one.do(("encoded", 0))
        assert len(real.plans) < 2000, "a request or an encode never ran"
    assert modelled.plans == real.plans
    assert real.memory.free == TOTAL


def test_more_than_is_free_is_not_lent() -> None:
    real = Real()
    real.begin(20)
    with pytest.raises(ValueError, match="free blocks"):
        real.lent.resize(5)
    assert len(real.lent) == 0
    real.check()


def test_cached_blocks_are_taken_last_and_the_oldest_of_them_first() -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    real, names = Real(), [make_block_hash_with_group_id(bytes([one]) * 32, 0) for one in range(3)]  # type: ignore[arg-type]
    cached = real.pool.get_new_blocks(3)
    for name, one in zip(names, cached, strict=True):
        real.pool._insert_block_hash(name, one, num_tokens=16)
    real.pool.free_blocks(cached)
    found = real.pool.cached_block_hash_to_block.get_one_block
    real.lent.resize(TOTAL - 3)
    assert [found(one) is not None for one in names] == [True, True, True]
    real.lent.resize(TOTAL - 2)
    assert [found(one) is not None for one in names] == [False, True, True]
    real.lent.resize(0)
    assert [found(one) is not None for one in names] == [False, True, True]
    assert real.free == TOTAL


def test_the_pool_has_all_blocks_while_its_prefix_cache_is_reset() -> None:
    real = Real()
    real.lent.resize(4)
    real.lent.take_new()
    assert not real.pool.reset_prefix_cache()  # vLLM resets nothing while a block is in use
    with real.lent.returned():
        assert real.free == TOTAL
        assert real.pool.reset_prefix_cache()
    assert (len(real.lent), real.free) == (4, TOTAL - 4)
    assert sorted(real.lent.take_new()) == sorted(real.lent.block_ids), "workers are told of what is lent anew"


def test_a_block_that_returned_is_not_told_of() -> None:
    real = Real()
    real.lent.resize(4)
    kept = real.lent.block_ids[:1]
    real.lent.resize(1)
    assert list(real.lent.take_new()) == kept
    assert not real.lent.has_news


def test_pages_that_a_block_shares_with_its_neighbour_are_kept() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 8 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = np.frombuffer(memory, dtype=np.uint8)
    data[:] = 1
    size = page + page // 2
    pages = KvPages([Layer(data.ctypes.data + 64, size, 5)])
    assert pages.give_back([0]) == 0
    assert pages.give_back([1, 0]) == 2 * page  # adjacent blocks also free the page between them
    gone = np.flatnonzero(data == 0)
    assert gone[0] >= 64
    assert gone[-1] < 64 + 2 * size
    assert len(gone) == 2 * page
    data[:] = 2  # and the memory can be used again
    assert (data == 2).all()


class _Runner:
    def __init__(self, tensor: Any, blocks: int) -> None:
        self.kv_caches = [tensor]
        self.kv_cache_config = type("Config", (), {"num_blocks": blocks})


def test_a_cache_whose_blocks_are_in_pieces_is_refused() -> None:
    import torch

    with pytest.raises(ConfigError, match="a block is not in one piece"):
        kv_pages_of(_Runner(torch.zeros(2, 4, 8, 16).transpose(0, 1), 4))
