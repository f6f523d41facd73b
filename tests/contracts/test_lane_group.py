"""Lanes of several ranks: what they exchange, and what becomes of the others when one of them fails or dies."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import torch

from tests.support.descriptors import nothing_left_open
from tests.support.lanes import LONG
from vllm_omni_sched.config.errors import LaneGroupError, LanePeerError
from vllm_omni_sched.lanes import LaneGroup, join_group

HUGE = 1 << 20  # floats: more than a socket buffers


def groups_of(ranks: int, silence: float = LONG) -> list[LaneGroup]:
    """The groups of all ranks, connected in this process."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one, other in combinations(range(ranks), 2):
        ends[one][other], ends[other][one] = socket.socketpair()
    return [LaneGroup(rank, mine, silence) for rank, mine in enumerate(ends)]


@pytest.fixture(params=[2, 3])
def groups(request: pytest.FixtureRequest) -> Iterator[list[LaneGroup]]:
    with nothing_left_open():
        made = groups_of(request.param)
        yield made
        for group in made:
            group.close()


def on_all(groups: list[LaneGroup], call: Callable[[LaneGroup], Any]) -> list[Any]:
    """Run `call` on all ranks at once; return what it returned or raised on each."""

    def run(group: LaneGroup) -> Any:
        try:
            return call(group)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, groups, timeout=LONG))


def job(call: Callable[[LaneGroup], Any]) -> Callable[[LaneGroup], Any]:
    """A job that makes this call, and tells the others if it fails by itself."""

    def run(group: LaneGroup) -> Any:
        group.begin()
        try:
            return call(group)
        except LanePeerError:
            raise
        except ValueError as error:
            group.fail(str(error))
            raise

    return run


@pytest.mark.parametrize("shape", [(3, 4), (0,), (HUGE,)], ids=["small", "empty", "huge"])
def test_all_get_the_tensors_of_all_in_the_order_of_ranks(groups: list[LaneGroup], shape: tuple[int, ...]) -> None:
    found = on_all(groups, job(lambda group: group.exchange(torch.full(shape, group.rank + 1.0))))
    for parts in found:
        assert len(parts) == len(groups)
        for rank, part in enumerate(parts):
            assert torch.equal(part, torch.full(shape, rank + 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_sum_is_the_same_everywhere_and_rounded_once(groups: list[LaneGroup], dtype: torch.dtype) -> None:
    values = [torch.tensor([[1.0, 2.0], [256.0, 7.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]])]
    values += [torch.tensor([[5.0, 6.0], [1.0, 1.0]])]
    mine = [value.to(dtype).t() for value in values[: len(groups)]]  # not contiguous
    found = on_all(groups, job(lambda group: group.sum(mine[group.rank])))
    expected = sum(value.t() for value in values[: len(groups)]).to(dtype)  # type: ignore[union-attr]
    assert all(torch.equal(total, expected) for total in found)
    assert mine[0].tolist() == values[0].t().tolist()  # what was passed is as it was


def test_a_failure_is_told_and_the_next_job_goes_on(groups: list[LaneGroup]) -> None:
    def fails_at_last(group: LaneGroup) -> Any:
        group.exchange(torch.zeros(2))
        if group.rank == len(groups) - 1:
            raise ValueError("poisoned")
        return group.exchange(torch.zeros(HUGE))

    *others, failed = on_all(groups, job(fails_at_last))
    assert isinstance(failed, ValueError)
    for error in others:
        assert isinstance(error, LanePeerError)
        assert str(error) == f"it failed at rank {len(groups) - 1}: poisoned"
    found = on_all(groups, job(lambda group: group.sum(torch.ones(3))))
    assert [total.tolist() for total in found] == [[float(len(groups))] * 3] * len(groups)


def test_one_fails_after_the_others_have_finished(groups: list[LaneGroup]) -> None:
    def fails_late(group: LaneGroup) -> Any:
        group.exchange(torch.zeros(2))
        if group.rank == 0:
            raise ValueError("poisoned")
        return "done"

    assert on_all(groups, job(fails_late))[1:] == ["done"] * (len(groups) - 1)
    assert all(
        isinstance(found, list) for found in on_all(groups, job(lambda group: group.exchange(torch.zeros(HUGE))))
    )


def test_a_rank_that_ends_ends_the_group(groups: list[LaneGroup]) -> None:
    def ends(group: LaneGroup) -> Any:
        if group.rank == 0:
            group.close()
            return None
        return group.exchange(torch.zeros(HUGE))

    for error in on_all(groups, job(ends))[1:]:
        assert isinstance(error, LaneGroupError)
        assert "the lane of rank 0 has ended" in str(error)


def test_a_rank_that_is_silent_is_not_waited_for_in_vain() -> None:
    first, second = groups_of(2, silence=0.01)
    first.begin()
    with pytest.raises(LaneGroupError, match=r"sent or taken anything for 0\.01 seconds"):
        first.exchange(torch.zeros(1))
    for group in (first, second):
        group.close()


def test_ranks_that_do_not_make_the_same_calls_are_told_apart() -> None:
    pair = groups_of(2)
    found = on_all(pair, job(lambda group: group.exchange(torch.zeros(1 + group.rank))))
    assert any(isinstance(error, LaneGroupError) and "with 8 bytes" in str(error) for error in found)
    for group in pair:
        group.close()


def slots_of(group: LaneGroup) -> int:
    """The size of the slots of this rank's memory, in bytes."""
    assert group._slots is not None
    return group._slots.size


def test_slots_grow_with_the_tensors_and_stay_within_a_job(groups: list[LaneGroup]) -> None:
    sizes = (4, 1 << 14, 16, 1 << 16, 0, 1 << 16, 3)

    def sums(group: LaneGroup) -> list[torch.Tensor]:
        return [group.sum(torch.arange(size) + group.rank) for size in sizes]

    ranks = len(groups)
    expected = [torch.arange(size) * ranks + sum(range(ranks)) for size in sizes]
    for found in on_all(groups, job(sums)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [slots_of(group) for group in groups] == [8 << 16] * ranks


def test_after_a_failure_a_slow_rank_still_reads_what_it_got() -> None:
    """Rank 1 learns from rank 2 that the job has failed, and begins the next one, while rank 0 is at its last call."""
    three = groups_of(3, silence=0.05)
    next_job, slow = threading.Event(), three[0]

    def run(group: LaneGroup) -> list[list[float]]:
        group.begin()
        parts = group._parts(torch.full((2,), group.rank + 1.0))
        if group.rank == 2:
            group.fail("poisoned")
        elif group.rank == 1:
            with pytest.raises(LanePeerError):
                group._parts(torch.zeros(2))
        if group is not slow:
            group.begin()
            with pytest.raises(LaneGroupError, match=r"for 0\.05 seconds"):  # rank 0 does not come
                group.exchange(torch.full((2,), -1.0))
            if group.rank == 1:
                next_job.set()
            return []
        next_job.wait(LONG)
        return [part.tolist() for part in parts]

    assert on_all(three, run)[0] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    for group in three:
        group.close()


def test_what_a_rank_has_sent_can_be_read_after_its_death(groups: list[LaneGroup]) -> None:
    found = on_all(groups, job(lambda group: group._parts(torch.full((HUGE,), group.rank + 1.0))))
    groups[0].close()
    groups[0]._slots = None
    assert [float(part.sum()) for part in found[1]] == [(rank + 1.0) * HUGE for rank in range(len(groups))]


@pytest.mark.parametrize(
    ("place", "memory", "words"),
    [
        (0, 64, "memory of rank 1 cannot be shared: .*Too many open files"),  # as if the kernel had dropped it
        (0, 0, "rank 1 has named memory that it has not shared"),
        (1, 0, "rank 1 has named memory that it has not shared"),
    ],
)
def test_memory_that_was_not_sent_is_not_read(place: int, memory: int, words: str) -> None:
    from vllm_omni_sched.lanes import group as lane_group

    ours, theirs = socket.socketpair()
    group = LaneGroup(0, {1: ours}, LONG)
    theirs.send(lane_group._HEADER.pack(1, 1, 0, 8, place, memory))
    group.begin()
    with pytest.raises(LaneGroupError, match=words):
        group.exchange(torch.zeros(2))
    group.close()
    theirs.close()


def test_memory_is_sent_once_and_no_descriptor_stays_open(groups: list[LaneGroup]) -> None:
    on_all(groups, job(lambda group: group.sum(torch.zeros(64))))
    with nothing_left_open():
        on_all(groups, job(lambda group: [group.sum(torch.zeros(64)) for _ in range(3)]))
        on_all(groups, job(lambda group: group.sum(torch.zeros(128))))  # in larger memory


def meet(ranks: int, secret: str = "secret", generation: int = 0, timeout: float = LONG) -> list[Any]:
    def join(rank: int) -> Any:
        try:
            return join_group(secret, generation, rank, ranks, timeout=timeout)
        except LaneGroupError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(join, range(ranks), timeout=LONG))


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_that_know_the_secret_meet(ranks: int) -> None:
    with nothing_left_open():
        met = meet(ranks, f"secret-{os.getpid()}-{ranks}")
        found = on_all(met, job(lambda group: group.exchange(torch.tensor([group.rank]))))
        assert [torch.cat(parts).tolist() for parts in found] == [list(range(ranks))] * ranks
        for group in met:
            group.close()


def test_a_rank_does_not_wait_for_ever_for_the_others() -> None:
    with nothing_left_open():
        for rank in (0, 1):
            with pytest.raises(LaneGroupError, match="the lanes of other ranks have not come in time"):
                join_group(f"alone-{os.getpid()}", 0, rank, 2, timeout=0.05)


def test_another_generation_is_another_group() -> None:
    secret = f"generations-{os.getpid()}"
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(join_group, secret, 0, 1, 2, timeout=0.2)
        with pytest.raises(LaneGroupError):
            join_group(secret, 1, 0, 2, timeout=0.2)
        with pytest.raises(LaneGroupError):
            old.result(LONG)


def test_what_is_no_rank_is_not_let_in() -> None:
    from vllm_omni_sched.lanes import group as lane_group

    secret = f"stranger-{os.getpid()}"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join_group, secret, 0, 0, 2, timeout=LONG)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                stranger.connect(lane_group._name(secret, 0, 0))
                break
            except ConnectionRefusedError:
                continue
        stranger.close()  # without a word
        second = pool.submit(join_group, secret, 0, 1, 2, timeout=LONG)
        both = [first.result(LONG), second.result(LONG)]
    assert [len(parts) for parts in on_all(both, job(lambda group: group.exchange(torch.zeros(1))))] == [2, 2]
    for group in both:
        group.close()
