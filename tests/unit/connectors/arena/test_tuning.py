"""How long a message may be that goes through the ring follows from what receivers measure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.arena import EDGE, KIB, MIB, pixels, place, small
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport, tuning
from vllm_omni_sched.connectors.arena.inbox import TELL_EVERY
from vllm_omni_sched.connectors.arena.transport import TUNE_EVERY
from vllm_omni_sched.connectors.arena.tuning import MEASURED, RANGE, ReceivingCost, limit_of
from vllm_omni_sched.connectors.framing import make_message

POOL = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 4 * MIB, "inline_bytes": 16 * KIB}


def measured(copy: float, per_byte: float, view: float, times: int = MEASURED) -> ReceivingCost:
    cost = ReceivingCost()
    for _ in range(times):
        cost.copied(1 * KIB, copy)
        cost.copied(32 * KIB, copy + per_byte * 32 * KIB)
        cost.viewed(view / 2)
        cost.ended(view / 2)
    return cost


def test_the_limit_is_where_a_copy_takes_as_long_as_a_view() -> None:
    assert measured(20e-6, 1e-10, 30e-6).limit_bytes == pytest.approx(100e3)
    assert measured(20e-6, 1e-10, 10e-6).limit_bytes == 0  # a view is always quicker


def test_nothing_is_said_before_enough_was_measured() -> None:
    assert measured(20e-6, 1e-10, 30e-6, MEASURED - 1).limit_bytes is None
    assert measured(20e-6, 0.0, 30e-6).limit_bytes is None  # a clock that is too coarse
    cost = ReceivingCost()
    for _ in range(MEASURED):
        cost.copied(8 * KIB, 1e-5)  # neither few bytes nor many
        cost.viewed(1e-5)
        cost.ended(1e-5)
    assert cost.limit_bytes is None


def test_a_process_that_had_to_wait_for_its_processor_says_nothing() -> None:
    cost = measured(20e-6, 1e-10, 30e-6)
    for _ in range(MEASURED // 2 - 1):
        cost.copied(1 * KIB, 1.0)
        cost.copied(32 * KIB, 1.0)
        cost.viewed(1.0)
        cost.ended(1.0)
    assert cost.limit_bytes == pytest.approx(100e3)


@pytest.mark.parametrize(
    ("told", "limit"),
    [
        ([], 1000),
        ([2000.0], 2000),
        ([1500.0, 1600.0, 9e9], 1600),
        ([9e9], 1 * MIB),
        ([0.0], 1000 // RANGE),
        ([math.nan, -1.0, math.inf], 1000),  # no receiver says that
    ],
)
def test_a_limit_is_near_what_the_option_says(told: list[float], limit: int) -> None:
    assert limit_of(1000, told) == limit
    assert limit_of(0, told) == 0  # nothing goes through the ring, whatever receivers say


@pytest.mark.parametrize(
    ("inline", "bounds"),
    [
        (32 * KIB, (8 * KIB, 1 * MIB)),  # the design article's for text
        (64 * KIB, (16 * KIB, 1 * MIB)),
        (512 * KIB, (32 * KIB, 2 * MIB)),
        (1 * MIB, (32 * KIB, 4 * MIB)),  # the design article's for images
    ],
)
def test_a_limit_can_always_reach_both_of_the_design_article(inline: int, bounds: tuple[int, int]) -> None:
    assert (limit_of(inline, [0.0]), limit_of(inline, [9e9])) == bounds


@pytest.fixture
def options() -> Iterator[ArenaOptions]:
    with place() as root:
        yield small(root, image=POOL, ring_bytes=1 * MIB)


def send(path: ArenaTransport, count: int, nbytes: int) -> int:
    """Send messages to oneself; return how many went through the ring."""
    before = path.health().facts.get("inline", 0)
    for i in range(count):
        path.put(make_message(EDGE, f"{i}", pixels(1, nbytes)))
        assert path.get(EDGE, f"{i}") is not None
    return int(path.health().facts["inline"] - before)


@pytest.mark.parametrize(("tune_inline", "inline"), [(True, 1), (False, 0)])
def test_senders_do_as_receivers_tell(options: ArenaOptions, tune_inline: bool, inline: int) -> None:
    path = ArenaTransport(options.model_copy(update={"tune_inline": tune_inline}))
    assert send(path, 1, 30 * KIB) == 0
    (inbox,) = path.directory.glob("*.in")
    tuning.tell(inbox, 32.0 * KIB)
    (path.directory / "damaged.in").write_bytes(b"123")
    send(path, TUNE_EVERY, 100)
    assert send(path, 1, 30 * KIB) == inline
    assert path.health().facts["inline_up_to"]["image"] == (34 if tune_inline else 17) * KIB
    path.close()


def test_receivers_tell_now_and_then(options: ArenaOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ArenaTransport(options)
    monkeypatch.setattr(ReceivingCost, "limit_bytes", 5000.0)
    said: list[Any] = []
    monkeypatch.setattr(tuning, "tell", lambda inbox, limit: said.append((Path(inbox).suffix, limit)))
    send(path, 3 * TELL_EVERY, 100)
    assert said == [(".in", 5000.0)] * 3
    path.close()
