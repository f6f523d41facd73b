"""The rules of `policy`, of expectations and of options, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.scripted_transport import ScriptedTransport
from tests.support.tiers import expect
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.connectors.auto import AutoOptions, auto_transport
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.extra import read_extra
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.routing import RoutedTransport
from vllm_omni_sched.connectors.tiers import Tier, TieredTransport, TiersOptions
from vllm_omni_sched.connectors.tiers.keeper import Waits
from vllm_omni_sched.connectors.tiers.place import next_use_seconds
from vllm_omni_sched.connectors.tiers.policy import (
    ItemState,
    Link,
    Move,
    Pool,
    TierReason,
    TierState,
    place,
    plan,
)

RULES = TiersOptions(min_bytes=10, high_water=0.8, low_water=0.5, long_wait_seconds=30.0, soon_seconds=1.0)
DOWN, UP = TierReason.HIGH_WATER, TierReason.EXPECTED_SOON


def tier(used: int, capacity: int = 1000, bytes_per_second: float = 1e9) -> TierState:
    link = Link(0.0, bytes_per_second)
    return TierState({"": Pool(capacity, used)}, link, link)


def item(number: int, nbytes: int = 100, next_use: float = 5.0, tier: int = 0, **options: Any) -> ItemState:
    return ItemState(number, tier, nbytes, next_use, **options)


@pytest.mark.parametrize(
    ("message", "used", "expected"),
    [
        (item(0), 0, [(0, "first"), (1, "no_room"), (2, "no_room")]),
        (item(0, next_use=31.0), 0, [(0, "first"), (1, "no_room"), (2, "no_room")]),  # there is room for it
        (item(0, next_use=31.0), 450, [(1, "long_wait"), (2, "long_wait"), (0, "first")]),
        (item(0, nbytes=9, next_use=31.0), 495, [(0, "first"), (1, "no_room"), (2, "no_room")]),  # too small
        (item(0, recompute_seconds=1.0), 0, [(0, "first"), (1, "no_room"), (2, "no_room")]),
        (item(0, recompute_seconds=0.1), 0, [(0, "first"), (1, "no_room")]),  # 0.2 s to tier 2 and back
        (item(0, recompute_seconds=1e-9), 0, [(0, "first")]),
    ],
)
def test_where_a_message_is_put(message: ItemState, used: int, expected: list[tuple[int, str]]) -> None:
    tiers = [tier(used), tier(0), tier(0, bytes_per_second=1000.0)]
    assert [(n, why.value) for n, why in place(message, tiers, RULES)] == expected


def test_nothing_moves_between_the_marks() -> None:
    assert plan([item(i) for i in range(8)], [tier(800), tier(0)], RULES) == ()


def test_above_the_high_mark_what_is_wanted_last_goes_down_until_the_low_one() -> None:
    items = [item(i, next_use=float(i)) for i in range(9)]
    assert plan(items, [tier(900), tier(0)], RULES) == tuple(Move(i, 1, DOWN) for i in (8, 7, 6, 5))


def test_large_messages_go_before_small_ones() -> None:
    items = [item(0, 400, 5.0), item(1, 100, 10.0), item(2, 400, 1.0)]
    assert plan(items, [tier(900), tier(0)], RULES) == (Move(0, 1, DOWN),)


def test_messages_go_where_there_is_room_that_pays() -> None:
    items = [item(i, 300, float(i)) for i in range(3)]
    full = tier(700)
    assert plan(items, [tier(900), full, tier(0)], RULES) == (Move(2, 2, DOWN), Move(1, 2, DOWN))
    assert plan(items, [tier(900), full], RULES) == ()  # they stay
    cheap = [item(i, 300, float(i), recompute_seconds=1e-9) for i in range(3)]
    assert plan(cheap, [tier(900), tier(0)], RULES) == ()
    assert plan([item(0, 9, 100.0)], [tier(900), tier(0)], RULES) == ()  # below min_bytes


def test_a_lower_tier_that_is_full_has_messages_moved_down_too() -> None:
    items = [item(i, 300, float(i) + 10, tier=1) for i in range(3)]
    assert plan(items, [tier(600), tier(900), tier(0)], RULES) == (Move(2, 2, DOWN), Move(1, 2, DOWN))


def test_what_is_wanted_soon_comes_up_while_there_is_room() -> None:
    items = [item(i, 200, next_use, tier=1) for i, next_use in enumerate([0.9, 0.1, 50.0, 0.5])]
    assert plan(items, [tier(100), tier(800)], RULES) == (Move(1, 0, UP), Move(3, 0, UP))
    assert plan(items, [tier(400), tier(800)], RULES) == ()


def test_soon_counts_the_time_of_moving() -> None:
    slow = tier(200, bytes_per_second=100.0)
    assert plan([item(0, 200, 2.9, tier=1)], [tier(0), slow], RULES) == (Move(0, 0, UP),)
    assert plan([item(0, 200, 3.1, tier=1)], [tier(0), slow], RULES) == ()


def test_pools_fill_up_by_themselves() -> None:
    upper = TierState({"text": Pool(100, 90), "image": Pool(1000, 90), "": Pool(1000, 0)})
    items = [item(0, 30, 1.0, pool="text"), item(1, 30, 2.0, pool="text"), item(2, 30, 9.0, pool="image")]
    assert plan(items, [upper, tier(0)], RULES) == (Move(1, 1, DOWN), Move(0, 1, DOWN))


def test_nothing_moves_twice_in_a_plan() -> None:
    items = [item(i, next_use=0.1) for i in range(9)]
    moves = plan(items, [tier(900), tier(0)], RULES)
    assert len({move.id for move in moves}) == len(moves) == 4


def test_waits_are_learnt_by_edge() -> None:
    waits, edge = Waits(1.0), Edge("0", "1")
    assert waits.expected(edge) == 1.0
    waits.observe(edge, 10.0)
    assert waits.expected(edge) == 10.0
    waits.observe(edge, 0.0)
    assert waits.expected(edge) == pytest.approx(8.0)
    assert waits.expected(Edge("1", "2")) == 1.0


def test_what_is_overdue_is_expected_later_and_later() -> None:
    assert [next_use_seconds(5.0, waited) for waited in (0.0, 4.0, 5.0, 7.0, 20.0)] == [5.0, 1.0, 0.0, 2.0, 15.0]


@pytest.mark.parametrize("pools", [{"": 4000}, {"image": 4000}, {"text": 4000, "image": 4000, "audio": 4000}])
def test_messages_come_up_into_whatever_pools_the_first_tier_has(pools: dict[str, int]) -> None:
    clock = [0.0]
    upper, lower = ScriptedTransport("upper", clock), ScriptedTransport("lower", clock)
    path = TieredTransport(
        [Tier(upper, pools), Tier(lower, {"": 4000})], RULES, clock=lambda: clock[0], background=False
    )
    for key, wait in (("a", 0.0), ("b", 0.0), ("late", 100.0)):
        expect(path, wait)
        path.put(make_message(Edge("0", "1"), key, {"x": np.zeros((1, 900), np.uint8)}))
    assert set(lower.messages) == {(Edge("0", "1"), "late")}
    assert path.discard("a") == 1
    expect(path, 0.5)
    assert path._view.is_worth_a_plan()
    assert path.move() is None
    assert not lower.messages
    assert path.health().facts["moved"] == {"lower->upper expected_soon": 1}
    path.close()


@pytest.mark.parametrize(
    "options", [{"high_water": 0.5}, {"disk": None}, {"order": ["disk", "disk"]}, {"order": ["mooncake"]}, {"hihg": 1}]
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TiersOptions.model_validate(options)


def test_tiers_that_cannot_be() -> None:
    one, two = (Tier(ScriptedTransport(name, [0.0]), {"": 1000}) for name in ("one", "two"))
    for tiers in ([one], [one, one]):
        with pytest.raises(ConfigError, match="at least two transports, with different names"):
            TieredTransport(tiers, RULES)
    with pytest.raises(ConfigError, match="needs room"):
        TieredTransport([one, Tier(two.transport, {"": 0})], RULES)
    for refused, says in (
        ({"arena": None, "mooncake": {}, "tiers": {}}, "'arena' is null"),
        ({"mooncake": {}, "tiers": {"mooncake": {}}}, "unset one of both"),
        ({"arena": None}, "no other transport is named"),
        ({"edges": {"0->1": ["mooncake"]}}, r"'edges.0->1' names \['mooncake'\]; there are \['arena'\]"),
        ({"foreign": {"arena": {"name": "X"}}}, "'foreign.arena' has the name of another transport"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_extra(AutoOptions, refused)


def test_paths_that_do_not_tell_what_was_got_have_no_tiers(tmp_path: Any) -> None:
    """With tiers, nothing would ever leave the ledger: `max_inflight` messages would stop the sender for good."""
    options: dict[str, Any] = {"arena": {"directory": str(tmp_path), "arena": "a"}, "foreign": {"x": {"name": "X"}}}
    auto_transport(AutoOptions.model_validate(options)).close()
    with pytest.raises(
        ConfigError, match=r"'tiers' and 'foreign' exclude each other: .* do not report when a message was received"
    ):
        read_extra(AutoOptions, options | {"tiers": {"disk": {"directory": str(tmp_path)}}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("arena", {"arena": {"ttl_seconds": 60}}),
        ("mooncake", {"mooncake": {"ttl_seconds": 60}}),
        ("tiers.disk", {"tiers": {"disk": {"ttl_seconds": 60}}}),
        ("tiers.mooncake", {"tiers": {"mooncake": {"ttl_seconds": 60}, "ttl_seconds": 61}}),
    ],
)
def test_no_tier_drops_messages_before_all_do(named: str, options: dict[str, Any]) -> None:
    """Dropped messages would count as received, and be learnt from."""
    with pytest.raises(ConfigError, match=rf"'{named}.ttl_seconds' \(60\) is below 'tiers.ttl_seconds' \(6"):
        read_extra(AutoOptions, {"tiers": {}, **options})


def test_tiers_are_asked_for_by_options(tmp_path: Any) -> None:
    options: dict[str, Any] = {"arena": {"directory": str(tmp_path), "arena": "a", "max_inflight": 7}}
    path = auto_transport(AutoOptions.model_validate(options))
    assert isinstance(path, RoutedTransport)  # as before
    path.close()
    options["tiers"] = {"disk": {"directory": str(tmp_path / "disk")}, "high_water": 0.9}
    (tmp_path / "disk").mkdir()
    path = auto_transport(AutoOptions.model_validate(options))
    assert isinstance(path, TieredTransport)
    facts = path.health().facts
    assert facts["tier_bytes"] == {"arena": 0, "disk": 0}
    assert facts["arena"]["status"] == "healthy"
    assert facts["disk"]["directory"].endswith("/a")  # under the name of the arena
    path.close()
