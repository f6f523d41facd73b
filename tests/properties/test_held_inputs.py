"""What runner V2 still holds of a request's items: vLLM's rule on a set of ids, and steps that touch what they change.

vLLM's own rule is `Scheduler._get_encoder_input_updates` (0.33+); here it is written out on a set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_omni_sched import OmniScheduler
from vllm_omni_sched.engine.encoder.pending import HeldInputs
from vllm_omni_sched.items import FeatureList
from vllm_omni_sched.testing import make_item, make_request, make_scheduler, run_step

LENGTH = 2  # tokens of an item
NUM_ITEMS = 12


class CountedFeatures(FeatureList):
    """Counts the items that are looked at."""

    __slots__ = ("looked_at",)

    def __getitem__(self, index: Any) -> Any:
        self.looked_at += 1
        return super().__getitem__(index)


class CountedId(int):
    """An item id that counts how often any of them is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedId.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def features_of(num_items: int, without_data: Iterable[int] = (), kind: type[FeatureList] = FeatureList) -> Any:
    bare = set(without_data)
    return kind(make_item(i * LENGTH, LENGTH, f"item-{i}", data=None if i in bare else 0) for i in range(num_items))


def by_vllm(pending: set[int], features: FeatureList, confirmed: int, encoding: list[int]) -> tuple[set[int], set[int]]:
    """(items sent again, items released) of one step, as vLLM finds them."""
    again = {i for i in encoding if i not in pending and features[i].data is not None}
    pending |= again
    gone = {i for i in pending if i not in encoding and (i + 1) * LENGTH <= confirmed}
    pending -= gone
    return again, gone


steps = st.lists(
    st.tuples(st.integers(-3, NUM_ITEMS * LENGTH), st.lists(st.integers(0, NUM_ITEMS - 1), unique=True)), max_size=12
)


@given(steps=steps, without_data=st.sets(st.integers(0, NUM_ITEMS - 1)))
def test_the_same_items_leave_as_in_vllm(steps: list[tuple[int, list[int]]], without_data: set[int]) -> None:
    """Whatever a step encodes, and however far back its request was rewound."""
    features = features_of(NUM_ITEMS, without_data)
    held, pending = HeldInputs(0, NUM_ITEMS), set(range(NUM_ITEMS)) - without_data
    for confirmed, encoding in steps:
        again, gone = by_vllm(pending, features, confirmed, encoding)
        missing = {i for i in held.missing(encoding) if features[i].data is not None}
        for item in missing:
            held.give_back(item)
        released = held.release(features, confirmed, encoding)
        assert missing == again
        assert set(released) == gone
        assert len(released) == len(gone), "an item was released twice in one step"
        assert {i for i in range(NUM_ITEMS) if i in held} - without_data == pending


def costs_of_steps(num_items: int, per_step: int, *, rewound: bool) -> list[int]:
    """Looks at items and comparisons of ids, in each step of a prompt that is computed `per_step` items at a time.

    Two steps are in flight, as under async scheduling. Rewound, the items were all released before.
    """
    features = features_of(num_items, kind=CountedFeatures)
    features.looked_at = 0
    held = HeldInputs(num_items if rewound else 0, num_items)
    costs = []
    for first in range(0, num_items, per_step):
        encoding = [CountedId(i) for i in range(first, first + per_step)]
        CountedId.compared, before = 0, features.looked_at
        for item in held.missing(encoding):
            held.give_back(int(item))
        held.release(features, (first - per_step) * LENGTH, encoding)
        # A step that finds its items in use as well as confirmed: they stay until it is over.
        held.release(features, first * LENGTH, encoding)
        costs.append(CountedId.compared + features.looked_at - before)
    return costs


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("per_step", [64, 1024])
def test_a_step_touches_what_it_encodes_and_what_leaves(per_step: int, rewound: bool) -> None:
    """Not every item that is in use for every one that leaves, nor what waits behind them."""
    for num_items in (2_048, 16_384):
        costs = costs_of_steps(num_items, per_step, rewound=rewound)
        assert max(costs) <= 24 * per_step, f"{num_items} items"


def test_items_in_use_stay_until_they_are_not() -> None:
    features, held = features_of(4), HeldInputs(0, 4)
    assert held.release(features, 3 * LENGTH, [1]) == [0, 2]
    assert held.release(features, 3 * LENGTH, [1]) == []
    assert 1 in held
    assert held.release(features, 3 * LENGTH, []) == [1]
    assert 1 not in held


@pytest.mark.skipif(
    not hasattr(Scheduler, "_get_encoder_input_updates"), reason="this vLLM tells runner V2 nothing of held items"
)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_in_many_steps_on_the_real_scheduler(monkeypatch: pytest.MonkeyPatch, async_scheduling: bool) -> None:
    release, costs = HeldInputs.release, []

    def counted(self: HeldInputs, features: Any, confirmed: int, in_use: Iterable[int]) -> Any:
        CountedId.compared = 0
        released = release(self, features, confirmed, [CountedId(i) for i in in_use])
        costs.append(CountedId.compared)
        return released

    monkeypatch.setattr(HeldInputs, "release", counted)
    for num_items in (2_048, 16_384):
        scheduler = make_scheduler(
            OmniScheduler,
            use_v2_model_runner=True,
            async_scheduling=async_scheduling,
            max_num_batched_tokens=1_024,
            num_blocks=2_000,
            options={"metrics": False},
        )
        request = make_request("a", num_items, [make_item(i, 1, f"item-{i}") for i in range(num_items)], max_tokens=8)
        scheduler.add_request(request)
        released: set[int] = set()
        while scheduler.requests:
            updates = run_step(scheduler).scheduled.encoder_input_updates
            released |= {i for i, data in updates.get("a", {}).items() if data is None}
        assert released == set(range(num_items))
    assert max(costs) <= 8 * 1_024
