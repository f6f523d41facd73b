"""What becomes of a load when its decoders fail or its codec is closed, and of the loads beside it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from tests.support import video_actors as actors
from tests.support.acted_codec import Watching, check, everything, service
from tests.support.descriptors import nothing_left_open
from tests.support.until import until
from vllm_omni_sched.config.errors import DecoderError, VideoDeadlineError, VideoError
from vllm_omni_sched.video.load import Fallback
from vllm_omni_sched.video.service import FlashCodec


@pytest.fixture(scope="module")
def codec() -> Iterator[FlashCodec]:
    with service(deadline_seconds=20.0) as codec:
        yield codec


def test_a_decoder_that_dies_once(codec: FlashCodec) -> None:
    decoded = codec.load(actors.video(24, die_once=[9]), everything)
    check(decoded, list(range(24)))
    assert decoded.report.fallbacks == ()


def test_a_piece_that_kills_decoders_is_missing(codec: FlashCodec) -> None:
    decoded = codec.load(actors.video(24, die=[9]), everything)
    check(decoded, [*range(8), *range(12, 24)])
    assert decoded.report.fallbacks.count(Fallback.DECODER_DIED.value) == 1


@pytest.mark.parametrize("end", ["odd_signal", "nested", "ready_again"])
def test_decoding_goes_on_whatever_a_process_says_or_dies_of(codec: FlashCodec, end: str) -> None:
    decoded = codec.load(actors.video(24, **{end: [9]}), everything)
    check(decoded, [*range(8), *range(12, 24)])
    assert codec.alive
    check(codec.load(actors.video(8), everything), list(range(8)))


def test_what_fails_in_the_thread_ends_one_load(codec: FlashCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = codec._dispatcher.pool
    for name in ("read", "assign", "end_job"):
        check(codec.load(actors.video(8), everything), list(range(8)))
        with monkeypatch.context() as broken:
            broken.setattr(pool, name, mock.Mock(side_effect=RuntimeError("broken")))
            if name == "end_job":
                codec.load(actors.video(8), everything)
            else:
                with pytest.raises(DecoderError, match="failed with an internal error"):
                    codec.load(actors.video(8), everything)
        assert codec.alive
    check(codec.load(actors.video(8), everything), list(range(8)))


def test_a_thread_that_cannot_be_started_may_be_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with service(actors.kind(1)) as codec:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(DecoderError, match="can't start new thread"):
                codec.load(actors.video(8), everything)
        check(codec.load(actors.video(8), everything), list(range(8)))
    assert not codec.alive


def test_a_piece_that_a_decoder_fails_at_is_missing(codec: FlashCodec) -> None:
    decoded = codec.load(actors.video(24, wrong=[9]), everything)
    check(decoded, [*range(8), *range(12, 24)])
    assert decoded.report.fallbacks.count(Fallback.DECODER_FAILED.value) == 1


@pytest.mark.parametrize("hanging", [actors.video(index="hang"), actors.video(hang=[9])])
def test_a_hang_ends_at_the_deadline(hanging: bytes) -> None:
    seen = Watching()
    with service(observer=seen) as codec:
        check(codec.load(actors.video(8), everything), list(range(8)))
        with pytest.raises(VideoDeadlineError, match="deadline_seconds"):
            codec.load(hanging, everything, deadline_seconds=0.3)
        check(codec.load(actors.video(8), everything), list(range(8)))
        until(lambda: codec._frames.used_bytes == 0)
    assert seen.restarts == 1  # only the one that hung
    assert [type(error) for error in seen.errors] == [VideoDeadlineError]
    assert len(seen.reports) == 2


def test_no_room_for_frames() -> None:
    with service(max_output_bytes=2 << 20) as codec:
        held = codec.load(actors.video(8), everything)
        with pytest.raises(VideoDeadlineError, match="max_output_bytes"):
            codec.load(actors.video(8), everything, deadline_seconds=0.3)
        timer = threading.Timer(0.1, lambda: holders.clear())
        holders = [held]
        del held
        timer.start()
        check(codec.load(actors.video(8), everything, deadline_seconds=20), list(range(8)))
        timer.join()


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        ("RefusingDecoder", Fallback.DECODER_REFUSED),
        ("OutOfMemoryDecoder", Fallback.DECODER_REFUSED),
        ("DyingDecoder", Fallback.DECODER_DIED),
        ("AbsentDecoder", Fallback.DECODER_ABSENT),
    ],
)
def test_another_kind_takes_over(decoder: str, reason: Fallback) -> None:
    with service(actors.kind(2, "other", decoder), actors.kind(1)) as codec:
        decoded = codec.load(actors.video(4), everything)
        check(decoded, list(range(4)))
        assert set(decoded.report.fallbacks) == {reason.value}
        again = codec.load(actors.video(4), everything)  # it may decode another video, but not what cannot be started
        check(again, list(range(4)))
        assert set(again.report.fallbacks) == (set() if reason is Fallback.DECODER_ABSENT else {reason.value})


def test_no_decoder_can_be_started() -> None:
    with service(actors.kind(2, decoder="AbsentDecoder")) as codec:
        for _ in range(2):
            with pytest.raises(DecoderError, match="no such library"):
                codec.load(actors.video(8), everything)


def test_closed() -> None:
    codec = service()
    decoded = codec.load(actors.video(8), everything)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(codec.load, actors.video(8, hang=[3]), everything)
        until(lambda: codec._dispatcher.pool.busy > 0)
        codec.close()
        with pytest.raises(DecoderError, match="closed"):
            loading.result(timeout=20)
    with pytest.raises(DecoderError, match="closed"):
        codec.load(actors.video(8), everything)
    with pytest.raises(DecoderError, match="closed"):
        codec.start()
    codec.close()
    check(decoded, list(range(8)))  # frames outlive it


def test_many_at_once_among_them_bad_ones(codec: FlashCodec) -> None:
    videos = [actors.video(20, slow=[n]) if n % 4 else actors.video(20, index="wrong") for n in range(24)]
    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(codec.load, one, everything) for one in videos]
        for n, load in enumerate(loads):
            if n % 4:
                check(load.result(timeout=30), list(range(20)))
            else:
                assert isinstance(load.exception(timeout=30), DecoderError)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may go between the opening and the reading
        return True


def children() -> int:
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


def test_nothing_is_left_behind(codec: FlashCodec) -> None:
    def both() -> None:
        check(codec.load(actors.video(12), everything), list(range(12)))
        for bad in (actors.video(index="wrong"), actors.video(refuse=[1]), b"x", actors.video(12, absent=[1])):
            try:
                codec.load(bad, everything)
            except VideoError:
                continue

    both()
    until(lambda: not codec._dispatcher._jobs)
    before = children()
    with nothing_left_open():
        for _ in range(20):
            both()
        until(lambda: not codec._dispatcher._jobs)
    assert children() == before
    until(lambda: codec._frames.used_bytes == 0)


def test_closing_leaves_nothing() -> None:
    gc.collect()
    before = children()
    with nothing_left_open():
        for _ in range(2):
            with service() as codec:
                codec.load(actors.video(12), everything)
            del codec
    assert children() == before


def test_a_killed_decoder_is_replaced() -> None:
    seen = Watching()
    with service(observer=seen) as codec:
        codec.load(actors.video(8), everything)
        pids = [slot.process.pid for slot in codec._dispatcher.pool.slots if slot.process]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(ended(pid) for pid in pids))
        check(codec.load(actors.video(24), everything), list(range(24)))
    assert seen.restarts == len(pids) == 2
