"""The encoder compute budget and its split among modalities."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.engine.encoder_budget import EncoderBudget, ModalityDemand


def demand(name, total, head=None, since=0.0, largest=None):
    head = total if head is None else head
    return ModalityDemand(name, total, largest or head, head, since)


@pytest.mark.parametrize(
    ("wanted", "demands", "embeds", "reason", "parts"),
    [
        (500, [demand("image", 300)], 500, "wanted", [(300, "all")]),
        (5000, [demand("image", 300)], 1000, "profiled", [(300, "all")]),
        (5, [demand("image", 300)], 300, "largest_item", [(300, "all")]),
        (0, [], 0, "wanted", []),
        (-3, [], 0, "largest_item", []),
        (100, [demand("image", 500, 10), demand("audio", 500, 10)], 100, "wanted", [(50, "fair"), (50, "fair")]),
        (100, [demand("image", 500, 10), demand("audio", 20, 10)], 100, "wanted", [(80, "fair"), (20, "all")]),
        # the oldest item of all fits, even if that is more than fair
        (
            100,
            [demand("image", 500, 90, 1), demand("audio", 500, 10, 2)],
            100,
            "wanted",
            [(90, "oldest_item"), (10, "fair")],
        ),
        (100, [demand("image", 500, 90, 2), demand("audio", 500, 10, 1)], 100, "wanted", [(50, "fair"), (50, "fair")]),
    ],
)
def test_rules(wanted, demands, embeds, reason, parts):
    plan = EncoderBudget(profiled_embeds=1000).plan(wanted, demands)
    assert (plan.embeds, plan.reason.value) == (embeds, reason)
    assert [(share.embeds, share.reason.value) for share in plan.shares] == parts
    assert [share.modality for share in plan.shares] == [d.modality for d in demands]


sizes = st.lists(st.integers(1, 400), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.integers(-10, 2000), st.lists(st.tuples(sizes, st.integers(0, 9)), max_size=4))
def test_bounds_and_conservation(wanted, queues):
    demands = [ModalityDemand(f"m{i}", sum(q), max(q), q[0], since) for i, (q, since) in enumerate(queues)]
    plan = EncoderBudget(400).plan(wanted, demands)
    assert max((d.largest_embeds for d in demands), default=0) <= plan.embeds <= 400
    assert sum(s.embeds for s in plan.shares) == min(plan.embeds, sum(d.total_embeds for d in demands))
    assert all(0 <= s.embeds <= d.total_embeds for s, d in zip(plan.shares, demands, strict=True))
    if demands:
        oldest = min(range(len(demands)), key=lambda i: demands[i].waiting_since)
        assert plan.shares[oldest].embeds >= demands[oldest].head_embeds


@settings(deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4), st.integers(0, 400))
def test_every_item_is_encoded_in_at_most_as_many_steps_as_there_are_items(queues, wanted):
    """Each modality encodes from its head what fits into its part; one item per step at least."""
    budget, queues = EncoderBudget(400), [list(q) for q in queues]
    since = [0.0] * len(queues)
    items = sum(map(len, queues))
    for step in range(items):
        waiting = [i for i, q in enumerate(queues) if q]
        demands = [ModalityDemand(f"m{i}", sum(queues[i]), max(queues[i]), queues[i][0], since[i]) for i in waiting]
        before = sum(map(len, queues))
        for i, share in zip(waiting, budget.plan(wanted, demands).shares, strict=True):
            left = share.embeds
            while queues[i] and queues[i][0] <= left:
                left -= queues[i].pop(0)
                since[i] = step + 1.0
        assert sum(map(len, queues)) < before or before == 0
    assert not any(queues)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncoderBudget(0), "profiled_embeds"),
        (lambda: EncoderBudget(9).plan(9, [demand("image", 10)]), "a waiting item has 10 embeddings"),
        (lambda: demand("image", 5, 6), "image: need 1 <= head_embeds"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()
