"""Rules of the pipeline core, event by event; its laws of conservation are checked after each."""

from __future__ import annotations

import pytest

from tests.support.core import Line, started
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.requests import StageWork, item_key
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.pipeline.stage_cost import Features

pytestmark = pytest.mark.usefixtures("validated_core")

AR, GENERATION = StageKind.AR, StageKind.GENERATION
BY_QUEUE = {"balancing": {"policy": "least-queue"}}


def test_requests_wait_for_room_and_start_in_order() -> None:
    line = Line(AR)
    assert line.come("a") == ["a@0"]
    assert line.come("b") == []
    assert line.come("c") == []
    assert line.finish("a") == ("a",)
    assert line.tick() == ["b@0"]


def test_the_class_decides_who_is_next() -> None:
    line = Line(AR)
    line.come("first")
    slow, fast = (line.core.context.classes.by_name[name] for name in ("batch", "realtime"))
    for name, sla in (("slow", slow), ("fast", fast)):
        request = line.arrive(name)
        request.sla = sla
        line.submit(request)
    line.finish("first")
    assert line.tick() == ["fast@0"]


@pytest.mark.parametrize(
    ("order", "running_tokens", "expected"),
    [("balanced", 10_000, "long@0"), ("balanced", 1_000_000, "a@0"), ("arrival", 10_000, "a@0")],
)
def test_the_longest_goes_ahead_if_the_work_of_all_replicas_would_end_before_it(
    order: str, running_tokens: int, expected: str
) -> None:
    line = Line(AR, replicas=2, graph={"priority": {"without_deadline": order}})
    tokens = {"first": 10_000, "running": running_tokens, "a": 10_000, "b": 10_000, "long": 100_000}
    for name, count in tokens.items():
        line.features = Features(prompt_tokens=count)
        request = line.arrive(name)
        request.sla = line.core.context.classes.by_name["batch"]
        line.submit(request)
    line.finish("first")
    assert line.tick() == [expected]


def test_identical_work_is_done_once_and_goes_on_when_its_request_leaves() -> None:
    line = Line(GENERATION)
    assert line.come("a", key="same") == ["a@0"]
    assert line.come("b", key="same") == []
    actions = line.tell(e.Detached(0, "a"))
    assert [type(one) for one in actions] == [e.Continued]
    assert line.tell(e.Dropped(0, "a")) == []
    stage = line.core.stages[0]
    assert stage.receivers("a") == ("b",)
    assert stage.leader_of("b") == "a"
    assert line.finish("a") == ("b",)
    assert not stage.running


def test_work_that_nobody_needs_is_stopped() -> None:
    line = Line(GENERATION)
    line.come("a", key="same")
    line.come("b", key="same")
    line.tell(e.Detached(0, "a"))
    line.tell(e.Dropped(0, "a"))
    (stop,) = line.tell(e.Detached(0, "b"))
    assert isinstance(stop, e.Stop)
    assert stop.work.request_id == "a"
    assert [type(one) for one in line.tell(e.Dropped(0, "a"))] == [e.Gone]


def test_a_follower_waits_in_the_place_of_one_that_leaves_the_queue() -> None:
    line = Line(GENERATION)
    line.come("first")
    line.come("a", key="same")
    line.come("b", key="same")
    (inherited,) = line.tell(e.Detached(0, "a"))
    assert isinstance(inherited, e.Inherited)
    line.tell(e.Dropped(0, "a"))
    line.finish("first")
    assert line.tick() == ["b@0"]


def test_credits_of_the_next_stage_hold_a_request_back() -> None:
    line = Line(AR, AR, at_once=4, runtime={"credits": {"enabled": True, "capacity": 1}})
    a = line.arrive("a")
    assert line.submit(a) == ["a@0"]
    assert line.come("b") == []
    line.finish("a")
    line.submit(a, 1)
    line.finish("a", 1)
    assert line.tick() == ["b@0"]


def test_what_a_dead_replica_had_is_lost_and_what_it_never_got_waits_again() -> None:
    line = Line(AR, replicas=2, at_once=2, **BY_QUEUE)
    line.come("a")
    work = line.core.stages[0].running["a"]
    lost = line.tell(e.ReplicaDied(0, 0))[0]
    assert lost == e.Lost(work, 0)
    assert line.come("b") == ["b@1"]
    started_b = line.core.stages[0].running["b"]
    started_b.sent = False
    line.tell(e.ReplicaUp(0, 0))
    again = line.tell(e.ReplicaDied(0, 1))[0]
    assert again == e.Lost(started_b, 1, waits=True)
    assert line.tick() == ["b@0"]


def test_a_batch_is_held_until_its_window_is_over() -> None:
    line = Line(GENERATION, at_once=4, batching={"hold_ms": 50.0})
    line.come("a")
    request = line.arrive("b")
    work = StageWork(request_id="b", stage_id=0, known=request, arrived=0.0)
    line.tell(e.Submitted(work, line.features))
    (wake,) = line.tell(e.Waits(work))
    assert wake == e.Wake(0, 0.05)
    line.now = 0.05
    assert line.tell(e.Woken(0, 0.04)) == []
    assert started(line.tell(e.Woken(0, 0.05))) == ["b@0"]


@pytest.mark.parametrize(
    ("item_seconds", "waited", "keys", "chosen"),
    [
        (None, 0.8, ["picture"], 0),  # nothing is learnt: half of 1 s is saved, and 0.2 s are left there
        (0.2, 0.8, ["picture"], 1),  # 1.4 s there and 1.2 s here
        (2.0, 1.4, ["picture"], 0),  # 2.6 s and 3 s
        (2.0, 1.4, ["another"], 1),  # 4.6 s and 3 s; nothing draws it there
        (2.0, 1.4, ["picture", "another"], 1),  # half of its items: 3.6 s and 3 s
    ],
)
@pytest.mark.parametrize("user", [frozenset(), frozenset({"user u"})])
def test_a_replica_is_preferred_by_the_encodes_that_it_saves(
    item_seconds: float | None, waited: float, keys: list[str], chosen: int, user: frozenset[str]
) -> None:
    line = Line(AR, replicas=2, at_once=4, balancing={"affinity_slack": 0.0})
    text = Features(output_tokens=100)
    line.features = Features(output_tokens=100, items=1)
    if item_seconds is not None:
        for _ in range(100):
            line.core.context.costs.observe("0", text, 1.0)
            line.core.context.costs.observe("0", line.features, 1.0 + item_seconds)
    assert line.come("a", keys=user | {item_key("picture")}) == ["a@0"]
    line.now += waited
    assert line.come("b", keys=user | {item_key(key) for key in keys}) == [f"b@{chosen}"]


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(TypeError, match="not an event"):
        Line(AR).tell("tick")  # type: ignore[arg-type]
