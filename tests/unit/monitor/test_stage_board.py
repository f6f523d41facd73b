"""What the board holds after what an adapter told it, and that it stays bounded."""

import dataclasses

import pytest

from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.monitor.stage_facts import Quantiles


@pytest.fixture
def board():
    return StageBoard([0, 1], anomalies=["stuck_queue"], incidents=["died"], window=10, max_in_flight=3)


def only(board, now=0.0):
    (view,) = board.snapshot(now).replicas
    return view


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0, None, None, None)),
        ([7.0], (1, 7.0, 7.0, 7.0)),
        ([2.0, 1.0], (2, 1.0, 2.0, 2.0)),
        (range(10, 0, -1), (10, 5, 9, 10)),  # nearest rank: 0.9 of ten is the ninth
        (range(1, 101), (100, 50, 90, 99)),
        (range(1, 1001), (1000, 500, 900, 990)),
    ],
)
def test_quantiles_are_of_the_nearest_rank(values, expected):
    assert dataclasses.astuple(Quantiles.of(values)) == expected


def test_the_life_of_a_request(board):
    board.submitted(0, 0, "a", 1.0)
    assert (only(board, 3.0).waiting, only(board, 3.0).running, only(board, 3.0).oldest_seconds) == (1, 0, 2.0)
    board.started(0, 0, "a", 1.5)
    board.started(0, 0, "a", 1.9)  # only the first time counts
    assert (only(board).waiting, only(board).running) == (0, 1)
    board.finished(0, 0, "a", 3.0)
    view = only(board)
    assert (view.waiting, view.running, view.oldest_seconds) == (0, 0, 0.0)
    assert (view.queue, view.latency) == (Quantiles(1, 0.5, 0.5, 0.5), Quantiles(1, 2.0, 2.0, 2.0))
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
    assert (view.waiting, view.running, view.latency.count) == (1, 0, 0)


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
    first, second = board.snapshot(2.0).replicas
    assert ((first.waiting, first.latency.p50), (second.waiting, second.oldest_seconds)) == ((0, 2.0), (1, 1.0))


def test_quantiles_slide(board):
    for index in range(30):
        board.submitted(0, 0, "a", 0.0)
        board.finished(0, 0, "a", float(index))
    assert only(board).latency == Quantiles(10, 24.0, 28.0, 29.0)
    assert sum(board.replicas[0, 0].latency_seconds.histogram.counts) == 30


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
    snapshot = board.snapshot(0.0)
    (edge,), (view,) = snapshot.edges, snapshot.replicas
    assert (edge.messages, edge.nbytes, edge.bytes_per_second, edge.transfer.p99) == (3, 3000, 3000.0, 0.25)
    assert (view.device_bytes, view.host_bytes, view.batch_limit, view.batch_size.p50) == (7, 8, 4, 3)
    assert (view.cache_hit_rate, snapshot.credits_free) == (0.75, {1: 5})
    assert view.cache_hit_rates == {}


def test_caches_of_a_replica_and_what_a_death_takes(board):
    board.cache(0, 0, "prefix", 30, 10)
    board.cache(0, 0, "prefix", 0, 20)
    board.cache(0, 0, "encoder", 0, 0)
    board.memory(0, 0, 7, 8)
    assert only(board).cache_hit_rates == {"prefix": 0.5}
    board.lost(0, 0)
    assert (only(board).device_bytes, only(board).host_bytes) == (None, None)
    assert only(board).cache_hit_rates == {"prefix": 0.5}


def test_a_clock_that_was_set_back_gives_no_negative_time(board):
    board.submitted(0, 0, "a", 5.0)
    board.started(0, 0, "a", 4.0)
    board.finished(0, 0, "a", 3.0)
    assert (only(board).queue.p50, only(board).latency.p50) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda b: b.submitted(2, 0, "a", 0.0), r"unknown stage 2, known are \[0, 1\]"),
        (lambda b: b.submitted(0, 1024, "a", 0.0), "replica must be 0 to 1023, got 1024"),
        (lambda b: b.anomaly(0, "leak"), r"unknown kind of anomaly 'leak', known are \['stuck_queue'\]"),
        (lambda b: b.incident(0, 0, "x"), "unknown kind of incident 'x'"),
        (lambda b: b.load("smell", observed=1.0), "unknown modality 'smell'"),
        (lambda b: b.load("text", observed=-1.0), "observed must be finite and 0 or more, got -1"),
        (lambda b: b.edge(0, 1, float("inf")), "seconds must be finite"),
        (lambda b: b.edge(0, 3, 1.0), "unknown stage 3"),
        (lambda b: b.moved(0, 3, "put", 1, 3, 1.0), "unknown stage 3"),
        (lambda b: b.moved(0, 1, "put", 1, -3, 1.0), "nbytes must be finite and 0 or more"),
        (lambda b: b.moved(0, 1, "lost", 1, 3, 1.0), r"side must be one of \['put', 'get'\], got 'lost'"),
        (lambda b: b.cache(0, 0, "disk", 1, 3), r"unknown cache 'disk', known are \['prefix', 'encoder'\]"),
        (lambda b: b.cache(0, 0, "prefix", 1, -3), "miss must be finite"),
        (lambda b: b.memory(0, 0, -1, 0), "device_bytes must be finite and 0 or more"),
        (lambda b: StageBoard([]), "stages, window and max_in_flight must be 1 or more, got 0, 1024 and 65536"),
    ],
)
def test_what_is_unknown_or_no_amount_is_refused(board, call, says):
    with pytest.raises(ValueError, match=says):
        call(board)
    assert board.edges == {}
