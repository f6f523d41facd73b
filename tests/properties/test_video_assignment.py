"""Sharing decoders, against what it promises: every piece once, nobody idle beside work, nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.order import DEFAULT_CLASSES, REALTIME
from vllm_omni_sched.video.pool.assignment import IdleDecoder, PieceAssigner, WaitingPiece, WaitingVideo

MAX_WAIT = 5.0
KINDS = ("cpu", "gpu")

pieces = st.lists(st.tuples(st.floats(0.001, 3.0), st.integers(1, 8)), min_size=1, max_size=6)
videos = st.lists(
    st.tuples(st.floats(0, 8), st.sampled_from(DEFAULT_CLASSES), st.sampled_from(KINDS), pieces), max_size=8
)


@dataclass
class Run:
    """Decoders at work, on a clock of their own."""

    decoders: list[str]
    now: float = 0.0
    busy: dict[int, tuple[float, int]] = field(default_factory=dict)  # until when, threads
    begun: list[tuple[int, int]] = field(default_factory=list)
    began_at: dict[tuple[int, int], float] = field(default_factory=dict)

    def step(self, share: PieceAssigner, work: list[WaitingVideo]) -> list[WaitingVideo]:
        idle = [IdleDecoder(n, kind) for n, kind in enumerate(self.decoders) if n not in self.busy]
        lent = sum(threads - 1 for _, threads in self.busy.values())
        sizes = {kind: self.decoders.count(kind) for kind in self.decoders}
        takes = share.plan(work, idle, sizes, lent, self.now)
        costs = {(video.key, piece.number): piece for video in work for piece in video.pieces}
        kinds = {video.key: video.kind for video in work}
        spare = len(idle) - len(takes) - lent
        assert len({take.decoder for take in takes}) == len(takes)
        assert sum(take.threads - 1 for take in takes) <= max(0, spare)
        for take in takes:
            piece = costs.pop((take.video, take.piece))  # not taken before
            assert take.decoder in {one.number for one in idle}
            assert self.decoders[take.decoder] == kinds[take.video]
            assert 1 <= take.threads <= piece.threads
            self.busy[take.decoder] = (self.now + piece.cost, take.threads)
            self.begun.append((take.video, take.piece))
            self.began_at[take.video, take.piece] = self.now
        for kind in set(self.decoders):  # no decoder is idle while a piece of its kind waits
            free = [n for n, of in enumerate(self.decoders) if of == kind and n not in self.busy]
            assert not free or not any(kinds[key] == kind for key, _ in costs)
        left = [
            WaitingVideo(one.key, one.arrival, one.sla, one.kind, kept)
            for one in work
            if (kept := tuple(piece for piece in one.pieces if (one.key, piece.number) in costs))
        ]
        return left


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)
@given(videos, st.lists(st.sampled_from(KINDS), max_size=5))
def test_every_piece_is_taken_once(arrivals: list, more: list[str]) -> None:  # type: ignore[type-arg]
    share, run = PieceAssigner(MAX_WAIT), Run([*KINDS, *more])
    coming = [
        WaitingVideo(key, arrival, sla, kind, tuple(WaitingPiece(n, *piece) for n, piece in enumerate(some)))
        for key, (arrival, sla, kind, some) in enumerate(sorted(arrivals, key=lambda one: one[0]))
    ]
    everything = sorted((one.key, piece.number) for one in coming for piece in one.pieces)
    work: list[WaitingVideo] = []
    while coming or work or run.busy:
        events = [until for until, _ in run.busy.values()] + [one.arrival for one in coming[:1]]
        run.now = max(run.now, min(events)) if events else run.now
        run.busy = {n: one for n, one in run.busy.items() if one[0] > run.now}
        while coming and coming[0].arrival <= run.now:
            work.append(coming.pop(0))
        work = run.step(share, work)
    assert sorted(run.begun) == everything


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(st.integers(1, 3), st.sampled_from(DEFAULT_CLASSES[1:]), pieces)
def test_nobody_waits_for_ever(decoders: int, sla, some) -> None:  # type: ignore[no-untyped-def]
    """Urgent videos come without end, as many as there is time for; one of another class is begun all the same."""
    share, run = PieceAssigner(MAX_WAIT), Run(["cpu"] * decoders)
    patient = WaitingVideo(0, 0.0, sla, "cpu", tuple(WaitingPiece(n, *piece) for n, piece in enumerate(some)))
    work, urgent = [patient], 0
    while not all((0, piece.number) in run.began_at for piece in patient.pieces):
        waiting = sum(one.key > 0 for one in work)
        for _ in range(2 * decoders - waiting):
            urgent += 1
            work.append(WaitingVideo(urgent, run.now, REALTIME, "cpu", (WaitingPiece(0, 0.2),)))
        work = run.step(share, work)
        run.now = min(until for until, _ in run.busy.values())
        run.busy = {n: one for n, one in run.busy.items() if one[0] > run.now}
    longest = sum(cost for cost, _ in some) + 0.2
    assert max(run.began_at[0, piece.number] for piece in patient.pieces) <= MAX_WAIT + longest
