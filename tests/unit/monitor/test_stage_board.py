"""What the board holds after what an adapter told it, and that it stays bounded."""

import pytest

from vllm_omni_sched.monitor.stage_board import StageBoard


@pytest.fixture
def board():
    return StageBoard([0, 1], anomalies=["stuck_queue"], incidents=["died"], max_in_flight=3)


def only(board):
    (facts,) = board.replicas.values()
    return facts


def test_the_life_of_a_request(board):
    board.submitted(0, 0, "a", 1.0)
    assert (only(board).waiting, only(board).running) == (1, 0)
    board.started(0, 0, "a", 1.5)
    board.started(0, 0, "a", 1.9)  # only the first time counts
    assert (only(board).waiting, only(board).running) == (0, 1)
    board.finished(0, 0, "a", 3.0)
    view = only(board)
    assert (view.waiting, view.running) == (0, 0)
    assert (view.queue_seconds.total, view.latency_seconds.total) == (0.5, 2.0)
    assert sum(view.queue_seconds.counts) == sum(view.latency_seconds.counts) == 1
    assert view.ended == {"finished": 1, "failed": 0, "aborted": 0, "lost": 0}


def test_every_request_leaves_once(board):
    for request in "abc":
        board.submitted(0, 0, request, 0.0)
    board.started(0, 0, "a", 0.0)
    board.finished(0, 0, "a", 1.0, ok=False)
    board.finished(0, 0, "a", 1.0)  # it has left
    board.aborted(0, 0, "a")
    board.aborted(0, 0, "b")
    board.submitted(0, 0, "c", 2.0)  # again: what it was before is over
    board.started(0, 0, "unknown", 2.0)
    view = only(board)
    assert view.ended == {"finished": 0, "failed": 1, "aborted": 2, "lost": 0}
    assert (view.waiting, view.running, sum(view.latency_seconds.counts)) == (1, 0, 0)


def test_a_replica_that_dies_loses_its_requests(board):
    for request in "abc":
        board.submitted(1, 0, request, 0.0)
    board.started(1, 0, "b", 0.0)
    assert board.lost(1, 0) == ("a", "b", "c")
    assert board.lost(1, 0) == ()
    view = only(board)
    assert (view.waiting, view.running, view.ended["lost"]) == (0, 0, 3)


def test_the_same_request_in_two_stages_is_two(board):
    board.submitted(0, 0, "a", 0.0)
    board.submitted(1, 0, "a", 1.0)
    board.finished(0, 0, "a", 2.0)
    first, second = board.replicas[0, 0], board.replicas[1, 0]
    assert (first.waiting, first.latency_seconds.total, second.waiting) == (0, 2.0, 1)


def test_requests_that_never_end_are_forgotten(board):
    board.submitted(0, 0, "a", 0.0)
    board.started(0, 0, "a", 0.0)
    for request in "bcd":
        board.submitted(0, 0, request, 1.0)
    assert (only(board).waiting, only(board).running, board.forgotten) == (3, 0, 1)
    board.finished(0, 0, "a", 9.0)
    assert only(board).ended["finished"] == 0


def test_edges_memory_credits_and_hits(board):
    board.edge(0, 1, 0.25)
    board.moved(0, 1, "put", 1, 1000, 0.5)
    board.moved(0, 1, "put", 2, 2000, 0.25)
    board.moved(0, 1, "get", 3, 3000, 0.25)
    board.memory(0, 0, 7, None)
    board.memory(0, 0, None, 8)
    board.batch_limit(0, 0, 4)
    board.batch(0, 0, 3)
    board.credits(1, 5)
    for hit in (True, True, True, False):
        board.looked_up(0, 0, hit)
    edge, view = board.edges[0, 1], only(board)
    assert (edge.messages, edge.nbytes, edge.transfer_seconds.total) == (3, 3000, 0.25)
    assert edge.connector_seconds == {"put": 0.75, "get": 0.25}
    assert (view.device_bytes, view.host_bytes, view.batch_limit, view.batch_size.total) == (7, 8, 4, 3)
    assert (view.lookups, board.stages[1].credits_free) == ({"hit": 3, "miss": 1}, 5)
    assert view.prefix_tokens == view.encoder_items == {}


def test_caches_of_a_replica_and_what_a_death_takes(board):
    board.cache(0, 0, "prefix", 30, 10)
    board.cache(0, 0, "prefix", 0, 20)
    board.cache(0, 0, "encoder", 0, 0)
    board.memory(0, 0, 7, 8)
    assert only(board).prefix_tokens == {"hit": 30, "miss": 30}
    board.lost(0, 0)
    assert (only(board).device_bytes, only(board).host_bytes) == (None, None)
    assert only(board).prefix_tokens == {"hit": 30, "miss": 30}
