"""Messages that move while processes are killed at exact points, or fork."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.arena import EDGE, Ahead
from tests.support.processes import Process
from tests.support.tiers import DOWN, MANY, PAYLOAD, small_tiers
from vllm_omni_sched.connectors.arena.transport import BURY_EVERY
from vllm_omni_sched.connectors.disk.transport import SWEEP_EVERY
from vllm_omni_sched.connectors.tiers import TieredTransport

TTL = 600.0


def get_all(path: TieredTransport, count: int, clock: Ahead) -> dict[int, int]:
    """How often each message is there, if one asks again and again, for longer than anything is given back after."""
    got = dict.fromkeys(range(count), 0)
    for _ in range(4):
        for i in got:
            while (arrival := path.get(EDGE, f"m{i}")) is not None:
                payload = arrival.open()["x"]
                assert (payload.size, payload.min(), payload.max()) == (PAYLOAD, i % 251, i % 251)
                got[i] += 1
        clock.seconds += max(SWEEP_EVERY, BURY_EVERY) + 1
        path.health()
    return got


@pytest.mark.parametrize("first", ["upper", "lower"])
@pytest.mark.parametrize(
    "where",
    [
        "vllm_omni_sched.connectors.arena.index:Index.claim",
        "vllm_omni_sched.connectors.tiers.carry:message_of",
        "vllm_omni_sched.connectors.tiers.duplicates:Tickets.write",
        "vllm_omni_sched.connectors.disk.files:write",
        "os:rename",
        "vllm_omni_sched.connectors.disk.outbox:Outbox._enter",
        "vllm_omni_sched.connectors.arena.outbox:Outbox.end_lease",
        "vllm_omni_sched.connectors.tiers.duplicates:Tickets.remove",
    ],
)
def test_a_sender_killed_while_it_moves_a_message(
    start: Callable[..., Process], root: str, where: str, first: str
) -> None:
    """Whichever copy is found first, the message is got once. ``upper``: what the dead had is given back before."""
    clock, sender = Ahead(), start(**DOWN)
    receiver = small_tiers(root, clock)
    assert receiver.get(EDGE, "m0") is None
    sender.put_many(MANY, PAYLOAD)
    sender.die_at(where)
    sender.dies("move", 3)
    if first == "upper":
        clock.seconds = max(SWEEP_EVERY, BURY_EVERY) + 1
        receiver.health()
    assert set(get_all(receiver, MANY, clock).values()) == {1}
    clock.seconds += 3 * TTL
    receiver.health()
    clock.seconds += 3 * TTL
    receiver.health()
    assert [path.name for path in Path(root).rglob("*.m*")] == []
    receiver.close()


@pytest.mark.parametrize(
    "where",
    [
        "vllm_omni_sched.connectors.disk.files:read",
        "vllm_omni_sched.connectors.arena.outbox:Outbox.put",
        "vllm_omni_sched.connectors.arena.index:Index.publish",
        "vllm_omni_sched.connectors.disk.outbox:Outbox.end_lease",
    ],
)
def test_a_sender_killed_while_it_brings_a_message_up(start: Callable[..., Process], root: str, where: str) -> None:
    clock = Ahead()
    sender = start(
        high_water=0.5, low_water=0.5, expected_wait_seconds=100.0, long_wait_seconds=10.0, soon_seconds=1000.0
    )
    receiver = small_tiers(root, clock)
    sender.put_many(60, PAYLOAD)  # the last ones at once go below
    facts = sender.health()[2]
    assert facts["placed"]["disk long_wait"] > 5
    for i in range(20):
        arrival = receiver.get(EDGE, f"m{i}")
        assert arrival is not None
    del arrival
    sender.reap()
    sender.die_at(where)
    sender.dies("move", 3)
    got = get_all(receiver, 60, clock)
    assert {got[i] for i in range(20, 60)} == {1}
    assert receiver.health().facts["repeated"] <= 1
    receiver.close()


def test_a_receiver_killed_with_a_copy_of_a_move_that_was_left_gives_it_back(
    start: Callable[..., Process], root: str
) -> None:
    """It had taken the ticket; the other copy counts then."""
    clock, sender, dying = Ahead(), start(**DOWN), start()
    sender.put_many(MANY, PAYLOAD)
    sender.die_at("vllm_omni_sched.connectors.arena.outbox:Outbox.end_lease")
    sender.dies("move", 3)
    (ticket,) = Path(root).rglob("*.move")
    (moved,) = Path(root).rglob("*.msg")
    moved.unlink()  # so that only the copy in the arena is there
    receiver = small_tiers(root, clock)
    assert receiver.get(EDGE, "none") is None
    clock.seconds = BURY_EVERY + 1
    receiver.health()
    held = [i for i in range(MANY) if dying.get(f"m{i}", True) is not None]
    assert len(held) == MANY
    assert ticket.with_suffix(".moved").is_symlink()
    dying.kill()
    assert set(get_all(receiver, MANY, clock).values()) == {1}
    receiver.close()


def test_a_forked_child_is_told_that_tiers_are_not_its_own(start: Callable[..., Process]) -> None:
    process = start(moves_itself=True, **DOWN)
    process.put_many(90, PAYLOAD)
    said = process.fork_and_use()
    assert [line.split(":")[0] for line in said] == ["TransportClosedError", "TransportClosedError", "0", "closed"]
    assert process.get("m1") == (PAYLOAD, 1)
    process.close()
