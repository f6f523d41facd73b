"""The longest of those that wait without a deadline."""

import math

from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, WaitingOrder, WaitingRequest
from vllm_omni_sched.resource.pipeline.longest_waiting import LongestWaiting, peers_by_key, peers_of


def one(name, cost=1.0, sla=BATCH, **more):
    return WaitingRequest(name, 0.0, sla, cost_seconds=cost, **more)


def test_the_longest_is_first_and_of_equal_ones_the_earliest():
    waiting, peers = LongestWaiting(), peers_of(one("a"))
    for number, (name, cost) in enumerate([("a", 1.0), ("b", 3.0), ("c", 3.0), ("d", 2.0)]):
        waiting.push(one(name, cost), number)
    found = []
    while (first := waiting.first(peers)) is not None:
        found.append(first.request_id)
        waiting.remove(first.request_id)
    assert found == ["b", "c", "d", "a"]


def test_one_that_comes_again_counts_with_its_new_cost():
    waiting, peers = LongestWaiting(), peers_of(one("a"))
    waiting.push(one("a", 9.0), 0)
    waiting.push(one("b", 5.0), 1)
    waiting.remove("a")
    waiting.push(one("a", 1.0), 0)
    assert waiting.first(peers).request_id == "b"
    waiting.remove("unknown")


def test_priorities_and_ranks_are_kept_apart_and_deadlines_are_left_out():
    waiting = LongestWaiting()
    for number, request in enumerate(
        [one("a"), one("p", 2.0, priority=1), one("i", 9.0, INTERACTIVE), one("d", 9.0, due=5.0)]
    ):
        waiting.push(request, number)
    assert waiting.first(peers_of(one("x"))).request_id == "a"
    assert waiting.first(peers_of(one("x", priority=1))).request_id == "p"
    assert peers_of(one("x", sla=INTERACTIVE)) is peers_of(one("x", due=5.0)) is None


def test_the_sort_key_tells_the_same_peers_until_the_request_ages():
    order = WaitingOrder(max_wait_seconds=5.0)
    for request in (one("a"), one("p", priority=3), one("m", holds_memory=True), one("i", sla=INTERACTIVE)):
        assert peers_by_key(order.key(request, 1.0)) == peers_of(request)
        assert peers_by_key(order.key(request, 6.0)) is None


def test_what_is_kept_of_those_that_left_is_bounded():
    waiting, peers = LongestWaiting(), peers_of(one("a"))
    waiting.push(one("stays", math.pi), 0)
    for number in range(10_000):
        waiting.push(one("a", 1.0), number)
        waiting.remove("a")
    assert waiting.first(peers).request_id == "stays"
    assert sum(map(len, waiting._heaps.values())) < 200
