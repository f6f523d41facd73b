"""How far a sender may be ahead of its receivers, how long it waits for them, and how its pools grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest

from tests.support.arena import EDGE, KIB, MIB, FakeClock, pixels, place, small
from vllm_omni_sched.config.errors import NoRoomError, TransportClosedError
from vllm_omni_sched.connectors.arena import ArenaTransport, PoolOptions
from vllm_omni_sched.connectors.arena.storage import PIECE, Pool
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.transport import Status

Open = Callable[..., ArenaTransport]
OTHER = Edge("1", "2")


class Sleeper:
    """A clock that goes on when somebody sleeps; ``then`` happens at some sleep."""

    def __init__(self) -> None:
        self.clock, self.slept, self.then = FakeClock(), list[float](), dict[int, Callable[[], Any]]()

    def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.now += seconds
        self.then.pop(len(self.slept), lambda: None)()


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
def open_path(sleeper: Sleeper) -> Iterator[Open]:
    opened: list[ArenaTransport] = []
    with place() as root:

        def open_path(**options: Any) -> ArenaTransport:
            opened.append(ArenaTransport(small(root, **options), clock=sleeper.clock, sleep=sleeper))
            return opened[-1]

        yield open_path
        for path in opened:
            path.close()


def put(path: ArenaTransport, key: str, nbytes: int = 10, edge: Edge = EDGE, deadline: float | None = None) -> int:
    return path.put(make_message(edge, key, pixels(1, nbytes)), deadline)


def test_max_inflight_counts_messages_of_an_edge_that_nobody_has_got(open_path: Open) -> None:
    path = open_path(max_inflight=2)
    for key in "ab":
        put(path, key, 5 * KIB)
    with pytest.raises(NoRoomError, match=r"edge 0->1 has 2 messages \(\d+ bytes\) not received yet .*max_inflight"):
        put(path, "c")
    put(path, "c", edge=OTHER)
    assert path.health().status is Status.SICK
    held = path.get(EDGE, "a")
    assert path.health().status is Status.DEGRADED
    put(path, "c")  # "a" is held, but it was got
    with pytest.raises(NoRoomError):
        put(path, "d")
    del held
    with pytest.raises(NoRoomError):
        put(path, "d")
    assert path.discard("c") == 2
    put(path, "d")


def test_window_size_counts_their_bytes_and_lets_one_message_through(open_path: Open) -> None:
    path = open_path(window_size=10 * KIB)
    put(path, "larger", 20 * KIB)
    with pytest.raises(NoRoomError, match="window_size"):
        put(path, "a", 1)
    assert path.get(EDGE, "larger") is not None
    for key in "abc":
        put(path, key, 3 * KIB)
    with pytest.raises(NoRoomError):
        put(path, "d", 3 * KIB)
    assert path.get(EDGE, "b") is not None
    put(path, "d", 3 * KIB)


def test_put_waits_until_its_deadline(open_path: Open, sleeper: Sleeper) -> None:
    path = open_path(max_inflight=1)
    put(path, "a")
    with pytest.raises(NoRoomError):
        put(path, "b")
    assert sleeper.slept == []
    with pytest.raises(NoRoomError):
        put(path, "b", deadline=sleeper.clock() + 0.05)
    assert sleeper.slept[:3] == [
        ArenaTransport.first_wait,
        2 * ArenaTransport.first_wait,
        4 * ArenaTransport.first_wait,
    ]
    assert 0.05 <= sum(sleeper.slept) <= 0.05 + ArenaTransport.longest_wait
    assert max(sleeper.slept) == ArenaTransport.longest_wait
    with pytest.raises(NoRoomError):
        put(path, "b", deadline=sleeper.clock() - 1)
    assert path.health().facts["refused"] == 3


def test_put_goes_on_when_its_receiver_has_got_something(open_path: Open, sleeper: Sleeper) -> None:
    path = open_path(max_inflight=1)
    put(path, "a")
    sleeper.then[4] = lambda: path.get(EDGE, "a")
    put(path, "b", deadline=sleeper.clock() + 10)
    assert len(sleeper.slept) == 4
    for key in "cd":
        sleeper.then[len(sleeper.slept) + 1] = lambda: path.discard("b") + path.discard("c")
        put(path, key, deadline=sleeper.clock() + 10)
    assert len(sleeper.slept) == 6


def test_put_that_waits_is_told_of_the_close(open_path: Open, sleeper: Sleeper) -> None:
    path = open_path(max_inflight=1)
    put(path, "a")
    sleeper.then[2] = path.close
    with pytest.raises(TransportClosedError):
        put(path, "b", deadline=sleeper.clock() + 10)
    assert len(sleeper.slept) == 2


@pytest.fixture
def pool_file() -> Iterator[FilePath]:
    with place() as root:
        path = FilePath(root) / "1.pool"
        yield path
        path.unlink()


def test_a_pool_is_made_ready_in_the_background_and_grows_by_its_factor(pool_file: FilePath) -> None:
    options = PoolOptions(block_bytes=64 * KIB, initial_bytes=2 * PIECE, max_bytes=8 * PIECE, inline_bytes=0)
    pool = Pool(pool_file, options, growth_factor=1.75)

    def rest() -> int:
        """Return the size of the pool once its thread has ended."""
        if (warming := pool._warming) is not None:
            warming.join()
        return pool.extents.capacity

    assert pool_file.stat().st_blocks == 0
    assert pool.allocate(10) == (0, 64 * KIB)
    assert rest() == 2 * PIECE
    assert pool.allocate(2 * PIECE - 64 * KIB) is not None
    assert pool.extents.capacity == 2 * PIECE
    assert pool.allocate(10) is not None  # waits for no more than a piece, of one and a half
    assert rest() == 3.5 * PIECE
    assert pool.allocate(5 * PIECE) is not None  # 1.75 is not enough for that message
    assert rest() == 7 * PIECE + 64 * KIB
    assert pool.allocate(PIECE) is None
    assert pool.allocate(PIECE - 64 * KIB) is not None
    assert rest() == 8 * PIECE
    assert pool_file.stat().st_blocks * 512 == pool.memory.committed == 8 * PIECE
    pool.close()


def test_a_pool_holds_whole_blocks_and_no_more_than_its_bound(pool_file: FilePath) -> None:
    options = PoolOptions(block_bytes=192, initial_bytes=64 * KIB, max_bytes=1 * MIB, inline_bytes=0)
    pool = Pool(pool_file, options, growth_factor=2)
    count = 0
    while pool.allocate(100) is not None:
        count += 1
    assert count == 1 * MIB // 192
    assert pool.refused == ""
    pool.close()
