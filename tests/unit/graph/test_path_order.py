"""The order of a stage's queue by the promise for the whole path: its rules as tables."""

import math

import pytest

from vllm_omni_sched.graph.order import BATCH, REALTIME, SlaClass, Undated, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.path_order import PathOrder, PathRequest, path_request
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.graph.waiting_queue import WaitingQueue

TEN = SlaClass("ten", ttft_seconds=10.0, itl_seconds=math.inf, rank=1)
EDGES = {0: (), 1: (0,), 2: (0,), 3: (1, 2)}
GRAPH = StageGraph.of(Stage(n, f"s{n}", StageKind.AR, of, final_output=n == 3) for n, of in EDGES.items())


def request(name="a", arrival=0.0, costs=None, sla=TEN, **more):
    return PathRequest(name, arrival, costs or {}, sla, **more)


def order(waiting, stage_id=0, now=0.0, **options):
    placed = PathOrder(GRAPH, **options).plan(waiting, stage_id, now)
    return "".join(one.request.request_id for one in placed), [one.reason.value for one in placed]


@pytest.mark.parametrize(
    ("stage_id", "ready", "deadline", "due"),
    [
        # 1 s here, 4 s behind it on the costlier branch: 5 s of slack, a fifth of it for this stage
        (0, None, 6.0, 1.0),
        (0, 2.5, 6.0, 2.5 + 0.5),  # it came late: 2.5 s of slack left
        (1, 2.0, 9.0, 2.0 + 4.0 * 3 / 4),
        (2, 2.0, 9.0, 2.0 + 6.0 / 2),  # the cheaper branch has more
        (3, 5.0, 10.0, 9.0),  # the last stage may use all that is left
        (3, 9.5, 10.0, 9.0),
        (0, 8.0, 6.0, 8.0 - 3.0 / 5),  # lost already
    ],
)
def test_the_deadline_and_the_share_of_a_stage(stage_id, ready, deadline, due):
    one = path_request(GRAPH, request(costs={0: 1.0, 1: 3.0, 2: 1.0, 3: 1.0}, ready=ready), TEN, stage_id)
    assert one.deadline == pytest.approx(deadline)
    assert one.due == pytest.approx(due)
    assert one.arrival == 0.0


def test_no_promise_no_deadline():
    one = path_request(GRAPH, request(costs={0: 1.0}), BATCH, 0)
    assert one.latest_start == one.due == math.inf


def test_a_deadline_of_its_own_comes_before_that_of_the_class():
    assert path_request(GRAPH, request(deadline_seconds=3.0), BATCH, 0).deadline == 3.0


@pytest.mark.parametrize(
    ("waiting", "stage_id", "now", "expected", "reasons"),
    [
        # who has the costlier path before it goes first, though it came later and costs less here
        ([request("a", 0, {0: 2.0}), request("b", 1, {0: 1.0, 1: 7.0})], 0, 1, "ba", ["deadline", "deadline"]),
        # past its share of the slack, and not lost: before the others, not behind them
        (
            [request("a", 0, {0: 1.0, 1: 1.0}), request("b", -1, {0: 1.0, 1: 1.0}, ready=0)],
            0,
            6.5,
            "ba",
            ["deadline", "deadline"],
        ),
        # what cannot end in time any more gives way in its class
        ([request("a", 0, {0: 1.0, 1: 8.0}), request("b", 1, {0: 1.0})], 0, 1.5, "ba", ["deadline", "late"]),
        # classes, user priority and ageing are as in the waiting order
        ([request("a", sla=BATCH, priority=-5), request("b", 1)], 0, 1, "ba", ["deadline", "priority"]),
        ([request("a"), request("b", 1, priority=-1)], 0, 1, "ba", ["priority", "deadline"]),
        # it ages over the path: it came to this stage a moment ago
        ([request("a", 0, sla=BATCH, ready=30), request("b", 29, sla=REALTIME)], 1, 30, "ab", ["aged", "late"]),
    ],
)
def test_rules(waiting, stage_id, now, expected, reasons):
    assert order(waiting, stage_id, now) == (expected, reasons)


def test_shortest_first_where_nobody_was_promised_anything():
    waiting = [request("a", 0, {0: 3.0}, BATCH), request("b", 1, {0: 1.0}, BATCH), request("c", 2, {0: 1.0}, BATCH)]
    assert order(waiting, now=2)[0] == "abc"
    assert order(waiting, now=2, undated=Undated.SHORTEST) == ("bca", ["arrival"] * 3)
    assert order(waiting, now=30, undated=Undated.SHORTEST) == ("abc", ["aged", "arrival", "arrival"])
    # a deadline goes by slack all the same
    both = [request("a", 0, {0: 3.0}), request("b", 1, {0: 1.0})]
    assert order(both, now=1, undated=Undated.SHORTEST)[0] == "ab"


def test_longest_first_where_nobody_was_promised_anything():
    waiting = [request("a", 0, {0: 1.0}, BATCH), request("b", 1, {0: 3.0}, BATCH), request("c", 2, {0: 3.0}, BATCH)]
    assert order(waiting, now=2, undated=Undated.LONGEST) == ("bca", ["arrival"] * 3)
    assert order(waiting, now=30, undated=Undated.LONGEST) == ("abc", ["aged", "arrival", "arrival"])


@pytest.mark.parametrize("max_wait", [5.0, 9.0])
@pytest.mark.parametrize(("undated", "its", "others"), [(Undated.SHORTEST, 9.0, 1.0), (Undated.LONGEST, 1.0, 9.0)])
def test_nobody_starves_for_the_cost_of_others(max_wait, undated, its, others):
    """Each second two of the kind that goes first come for one place: the one of the other is served when it ages."""
    paths = PathOrder(GRAPH, max_wait_seconds=max_wait, undated=undated)
    waiting, now = [request("it", 0.0, {0: its}, BATCH)], 0.0
    while any(one.request_id == "it" for one in waiting):
        waiting += [request(f"s{now}{n}", now, {0: others}, BATCH) for n in "xy"]
        first = paths.plan(waiting, 0, now)[0].request.request_id
        waiting = [one for one in waiting if one.request_id != first]
        now += 1
    assert now - 1 == max_wait


def test_a_deadline_given_to_the_waiting_order_is_a_number():
    with pytest.raises(ValueError, match="'a': deadline and due"):
        WaitingRequest("a", 0.0, TEN, deadline=math.nan)


def test_the_queue_keeps_the_order_of_a_stage_up_to_date():
    paths = PathOrder(GRAPH)
    queue = WaitingQueue(WaitingOrder())
    waiting = [request(str(n), n / 4, {0: n % 3, 1: n % 5, 3: n % 2}) for n in range(20)]
    for one in waiting:
        queue.push(paths.at_stage(one, 0), one.arrival)
    for now in (5.0, 8.0, 11.0):  # some turn late in between
        assert [one.request_id for one in queue.ordered(now)] == [
            placed.request.request_id for placed in paths.plan(waiting, 0, now)
        ]
