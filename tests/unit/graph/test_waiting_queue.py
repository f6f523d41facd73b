"""The waiting queue: affinity, and looking ahead. (test_order.py compares it with the plan.)"""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.order import (
    DEFAULT_CLASSES,
    INTERACTIVE,
    PlaceReason,
    SlaClass,
    WaitingOrder,
    WaitingRequest,
)
from vllm_omni_sched.graph.waiting_queue import WaitingQueue


def queue_of(*requests: WaitingRequest, max_wait_seconds: float = 30.0) -> WaitingQueue:
    queue = WaitingQueue(WaitingOrder(max_wait_seconds))
    for one in requests:
        queue.push(one, 0.0)
    return queue


def request(
    id_: str, arrival: float = 0.0, *items: str, sla: SlaClass = INTERACTIVE, cost: float = 0.1
) -> WaitingRequest:
    return WaitingRequest(id_, arrival, sla, cost, affinity=frozenset(items))


def popped(queue: WaitingQueue, now: float = 0.0) -> list[str]:
    found = []
    while (one := queue.pop(now)) is not None:
        found.append(one.request.request_id)
    return found


def test_what_has_left_is_not_pulled_up():
    queue = queue_of(request("a", 0.0, "x"), request("b", 0.1), request("c", 0.2, "x"))
    queue.pop(0.0)
    queue.remove("c")
    assert popped(queue) == ["b"]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 9),
            st.sampled_from(DEFAULT_CLASSES),
            st.floats(0, 3),
            st.frozensets(st.sampled_from("xyz"), max_size=2),
        ),
        max_size=40,
    ),
    st.floats(0, 40),
)
def test_looking_ahead_gives_the_order_and_popping_gives_everyone_once(rows, now):
    order = WaitingOrder(max_wait_seconds=20)
    queue = WaitingQueue(order)
    waiting = [WaitingRequest(f"r{i:02}", a, sla, cost, affinity=share) for i, (a, sla, cost, share) in enumerate(rows)]
    for one in waiting:
        queue.push(one, 0.0)
    alone = [WaitingRequest(w.request_id, w.arrival, w.sla, w.cost_seconds) for w in waiting]
    expected = [placed.request.request_id for placed in order.plan(alone, now)]
    assert [one.request_id for one in queue.ordered(now)] == expected
    assert sorted(popped(queue, now)) == sorted(one.request_id for one in waiting)
    assert queue._sharing == {}


def test_a_look_at_the_queue_places_no_request_again():
    class CountingOrder(WaitingOrder):
        keys = 0

        def key(self, request, now):
            self.keys += 1
            return super().key(request, now)

    queue = WaitingQueue(CountingOrder())
    for number in range(5):
        queue.push(request(f"{number}", 0.1 * number), 0.0)
    looks = [queue.peek(0.1 * look) for look in range(10)]
    assert all(one is looks[0] for one in looks)
    assert queue.order.keys == 5
    assert queue.peek(1.95).reason is PlaceReason.DEADLINE  # the first one is late by now, and behind the others
    assert queue.order.keys == 6
