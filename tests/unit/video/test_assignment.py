"""The rules of `PieceAssigner`, one by one."""

from __future__ import annotations

from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME, SlaClass
from vllm_omni_sched.video.pool.assignment import (
    Assignment,
    AssignmentReason,
    IdleDecoder,
    PieceAssigner,
    WaitingPiece,
    WaitingVideo,
)

CPU, GPU = "cpu", "gpu"


def video(
    key: int,
    costs: list[float],
    *,
    arrival: float = 0.0,
    sla: SlaClass = INTERACTIVE,
    kind: str = CPU,
    threads: int = 1,
) -> WaitingVideo:
    left = tuple(WaitingPiece(number, cost, threads) for number, cost in enumerate(costs))
    return WaitingVideo(key, arrival, sla, kind, left)


def plan(
    videos: list[WaitingVideo], idle: int = 2, of: int | None = None, lent: int = 0, now: float = 0.0, kind: str = CPU
) -> list[Assignment]:
    idle_decoders = [IdleDecoder(number, kind) for number in range(idle)]
    return list(PieceAssigner(max_wait_seconds=10.0).plan(videos, idle_decoders, {kind: of or idle}, lent, now))


def order(takes: list[Assignment]) -> list[tuple[int, int]]:
    return [(take.video, take.piece) for take in takes]


def test_the_longest_piece_first() -> None:
    assert order(plan([video(1, [1.0, 3.0, 2.0, 3.0])])) == [(1, 1), (1, 3)]


def test_decoders_left_over_take_of_the_next_video() -> None:
    takes = plan([video(2, [5.0, 4.0], arrival=1.0), video(1, [1.0])], idle=3, now=1.0)
    assert [(take.video, take.reason) for take in takes] == [
        (1, AssignmentReason.FIRST),
        (2, AssignmentReason.NEXT),
        (2, AssignmentReason.NEXT),
    ]


def test_classes_go_by_rank() -> None:
    videos = [video(1, [1.0], sla=BATCH), video(2, [1.0]), video(3, [0.1], sla=REALTIME, arrival=0.1)]
    assert [one for one, _ in order(plan(videos, idle=3, now=0.1))] == [3, 2, 1]


def test_least_slack_first() -> None:
    assert order(plan([video(1, [0.1]), video(2, [0.5])], idle=1)) == [(2, 0)]


def test_slack_is_by_what_all_decoders_do_together() -> None:
    long, short = video(1, [1.0, 1.0, 1.0]), video(2, [0.1])
    assert order(plan([short, long], idle=1, of=2)) == [(1, 0)]  # 1.5 seconds of two decoders: it can be in time yet
    assert order(plan([short, long], idle=1, of=1)) == [(2, 0)]  # 3 seconds of one: it is late, whatever is done


def test_one_that_waited_long_goes_first() -> None:
    videos = [video(1, [1.0], sla=BATCH), video(2, [0.1], sla=REALTIME, arrival=10.0)]
    assert order(plan(videos, idle=1, now=9.9)) == [(2, 0)]
    assert order(plan(videos, idle=1, now=10.0)) == [(1, 0)]


def test_a_decoder_goes_on_with_the_video_it_has_open() -> None:
    idle_decoders = [IdleDecoder(0, CPU, 2), IdleDecoder(1, CPU), IdleDecoder(2, CPU, 1)]
    takes = PieceAssigner().plan([video(1, [1.0, 2.0]), video(2, [1.0], arrival=5.0)], idle_decoders, {CPU: 3}, 0, 5.0)
    assert {(take.decoder, take.video, take.piece) for take in takes} == {(0, 2, 0), (2, 1, 1), (1, 1, 0)}
    takes = PieceAssigner().plan([video(1, [1.0]), video(2, [1.0], arrival=5.0)], idle_decoders, {CPU: 3}, 0, 5.0)
    assert {(take.decoder, take.video) for take in takes} == {(2, 1), (0, 2)}


def test_a_lone_piece_gets_the_threads_of_idle_decoders() -> None:
    assert plan([video(1, [1.0], threads=16)], idle=4) == [Assignment(0, 1, 0, 4, AssignmentReason.LENT)]


def test_threads_are_shared_among_pieces() -> None:
    takes = plan([video(1, [1.0, 2.0], threads=16)], idle=5)
    assert [(take.piece, take.threads) for take in takes] == [(1, 3), (0, 2)]


def test_no_threads_while_pieces_wait_or_for_pieces_that_take_none_or_end_soon() -> None:
    assert [take.threads for take in plan([video(1, [1.0] * 3, threads=16)])] == [1, 1]
    assert [take.threads for take in plan([video(1, [1.0])])] == [1]
    assert [take.threads for take in plan([video(1, [0.001], threads=16)])] == [1]


def test_kinds_are_apart() -> None:
    videos = [video(1, [1.0], kind=GPU), video(2, [1.0, 2.0, 3.0])]
    idle_decoders = [IdleDecoder(0, CPU), IdleDecoder(1, GPU), IdleDecoder(2, GPU)]
    takes = PieceAssigner().plan(videos, idle_decoders, {CPU: 1, GPU: 2}, 0, 0.0)
    assert {(take.decoder, take.video, take.piece) for take in takes} == {(0, 2, 2), (1, 1, 0)}
