"""The benchmark of NVDEC without a card: arguments, clips, who decodes what, what is made of the samples."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.nvdec import __main__ as program
from benchmarks.gpu.nvdec.clips import EMBEDDED, digest, embedded
from benchmarks.gpu.nvdec.crew import Crew, shares, tasks
from benchmarks.gpu.nvdec.engine import serve
from benchmarks.gpu.nvdec.report import CPU, NVDEC, Cell, Found, complaints, record
from tests.support.nvcodec import HostDevice, NvCodec
from vllm_omni_sched.video.decoders.nvdec.decoder import NvdecDecoder
from vllm_omni_sched.video.decoders.nvdec.library import Library
from vllm_omni_sched.video.facts import Order, Piece
from vllm_omni_sched.video.plan import plan
from vllm_omni_sched.video.pool.messages import encode_index, encode_piece

without_a_card = pytest.mark.skipif(find_spec("PyNvVideoCodec") is not None, reason="a card may be here")


def piece(number: int, cost: float) -> Piece:
    return Piece(number, np.zeros(1, np.int32), (), Order.PTS, cost)


def found(**more: Any) -> Found:
    one, two, cpu = Cell("a clip", "all", NVDEC, 1), Cell("a clip", "all", NVDEC, 2), Cell("a clip", "all", CPU, 4)
    return Found(
        seconds={one: [0.4, 0.8, 0.4], two: [0.2, 0.4, 0.2], cpu: [2.0, 4.0, 2.0]},
        rates={one: [5.0, 5.0, 5.0], two: [9.0, 9.0, 9.0], cpu: [3.0, 3.0, 3.0]},
        **more,
    )


def test_the_embedded_clip_is_small_and_decodes_to_what_it_says() -> None:
    assert EMBEDDED.stat().st_size < 20_000
    clip = embedded()
    (task,) = tasks(clip)
    with Crew(CPU, [0], 24 * 176 * 144 * 3) as one:
        one.clear(clip, task)
        assert one.latency(clip, task, 1) > 0
        assert one.digests(clip, task) == clip.digests
        assert one.rate(clip, task, 1, 2) > 0


def test_a_card_decodes_the_embedded_clip_as_it_says(tmp_path: Path) -> None:
    clip = embedded()
    pieces = plan(clip.index, list(range(24)), 2).pieces
    (tmp_path / "index").write_bytes(encode_index(clip.index))
    (tmp_path / "packets").write_bytes(clip.packets)
    for one in pieces:
        (tmp_path / f"piece{one.number}").write_bytes(encode_piece(one))
    decoder = NvdecDecoder(library=Library(NvCodec()), device=HostDevice())
    output = memoryview(bytearray(24 * 176 * 144 * 3))
    serve(decoder, output, {"task": "open", "clip": str(tmp_path), "start": 0, "nbytes": len(output)})
    names = [f"piece{one.number}" for one in pieces]
    told = serve(decoder, output, {"task": "decode", "clip": str(tmp_path), "pieces": names})
    assert told["found"] == 24
    frames = np.frombuffer(output, np.uint8).reshape(24, 144, 176, 3)
    assert [digest(frame) for frame in frames] == clip.digests


def test_the_longest_piece_goes_first_to_whoever_has_least() -> None:
    given = shares([piece(n, cost) for n, cost in enumerate([1.0, 5.0, 3.0, 2.0])], 2)
    assert [[one.number for one in mine] for mine in given] == [[1, 0], [2, 3]]
    assert len(shares([piece(0, 1.0)], 7)) == 1


@without_a_card
def test_cpu_and_card_are_measured_and_what_refuses_is_told() -> None:
    options = program.parse(["--rounds", "1", "--videos", "1"])
    rows = json.loads(json.dumps(record(program.measure(options, [embedded()], [0]))))
    timed = [row for row in rows if "seconds" in row]
    assert {row["decoder"] for row in timed} == {CPU}
    assert 1 in {row["decoders"] for row in timed}
    assert [(row["compared"], row["wrong"]) for row in rows if "wrong" in row] == [(24, 0)]
    assert [row["decoder"] for row in rows if "refused" in row] == [NVDEC]
    (complaint,) = complaints(rows)
    assert complaint.startswith("NVDEC decoded nothing: ")
