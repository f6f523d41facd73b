"""Check what `benchmarks.streaming` makes of what its client has read, and how it keeps a server from running."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.harness.server import Server
from benchmarks.streaming import DEFAULT, OURS, STOCK, VARIANTS
from benchmarks.streaming.__main__ import DRAWN, main, parse, records_of, table
from benchmarks.streaming.client import read, request_id
from benchmarks.streaming.plot import draw
from benchmarks.streaming.probe import FOLDER, Sent, sent
from benchmarks.streaming.server import CPU, MEASURES, NAME, READY, ROLES, measured
from tests.support.until import until

SECONDS = dict.fromkeys((f"{kind}, {role}" for kind in (CPU, READY) for role in ROLES), 0.006)


def event(*token_ids: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "", "token_ids": list(token_ids)}]}).encode() + b"\n"


def lines(*events: tuple[float, tuple[int, ...]]) -> list[tuple[float, bytes]]:
    found = [(at, event(*token_ids)) for at, token_ids in events]
    return [*found, (found[-1][0], b'data: {"choices": []}\n'), (found[-1][0], b"data: [DONE]\n")]


def test_tokens_of_one_event_come_at_one_time() -> None:
    stream = read(1.0, lines((1.5, (7,)), (1.75, (8, 9, 10)), (2.0, (11,))), 5)
    assert stream.ttft == 0.5
    assert stream.gaps() == [0.25, 0.0, 0.0, 0.25]
    assert stream.gaps([5.0, 6.0, 8.0]) == [1.0, 0.0, 0.0, 2.0]
    assert stream.token_ids == [7, 8, 9, 10, 11]


def test_a_stream_without_all_its_tokens_ends_the_run() -> None:
    with pytest.raises(SystemExit, match="2 tokens instead of 3"):
        read(0.0, lines((1.0, (1, 2))), 3)


def test_a_burst_is_told_from_the_gaps_at_the_client_and_at_the_api_server() -> None:
    even = read(0.0, lines(*((at / 2, (at,)) for at in range(1, 6))), 5)
    burst = read(0.0, lines(*((2.5, (at,)) for at in range(1, 6))), 5)
    in_time = {request_id(NAME, 0): [0.4, 0.9, 1.4, 1.9, 2.4, 2.4, 2.4]}  # and the end of the stream
    told = [measured([one], in_time, SECONDS, step=0.5) for one in (even, burst)]
    assert [one["in bursts %"] for one in told] == [0.0, 100.0]
    assert [one["sent: in bursts %"] for one in told] == [0.0, 0.0]
    assert [one["ITL P50 ms"] for one in told] == [500.0, 0.0]
    assert [one["sent: ITL P99 ms"] for one in told] == [pytest.approx(500.0)] * 2
    assert [one["TTFT P50 ms"] for one in told] == [500.0, 2500.0]
    for one in told:
        assert (one["tokens / s"], one["step ms"]) == (2.0, 500.0)
        assert [one[measure] for measure in SECONDS] == [pytest.approx(1.2)] * len(SECONDS)
        assert one.keys() >= set(MEASURES)
        assert one["answers"] == [[1, 2, 3, 4, 5]]


def test_the_api_server_tells_when_it_has_sent_each_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    messages: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        for body in (b"data: 1", b"data: 2", b""):
            await send({"type": "http.response.body", "body": body})

    async def send(message: Any) -> None:
        messages.append(message)

    before = time.monotonic()
    for headers in ([(b"x-request-id", b"measured-0")], []):
        asyncio.run(Sent(app)({"type": "http", "headers": headers}, None, send))
    times = sent(tmp_path)["measured-0"]
    assert before <= times[0] <= times[1] <= time.monotonic()
    assert len(times) == 2
    assert len(messages) == 8
    assert sent(tmp_path) == {}


def rounds(*values: float, token: int = 1) -> list[dict[str, Any]]:
    return [
        {**dict.fromkeys(MEASURES, at), "sent: in bursts %": 0.0, "answers": [(token,)], "arrivals": [0.0, at / 1e3]}
        for at in values
    ]


def test_ratios_are_those_of_rounds_and_undefined_where_stock_has_none() -> None:
    of = {
        (1, STOCK): rounds(10.0, 40.0, 20.0),
        (1, OURS): rounds(5.0, 4.0, 4.0, token=2),
        (8, STOCK): rounds(1.0),
        (8, OURS): rounds(1.0),
    }
    records = records_of(of, [STOCK, OURS])
    ours = {one["measure"]: one for one in records if (one["streams"], one["variant"]) == (1, OURS)}
    assert (ours[DRAWN]["median"], ours[DRAWN]["of_stock"], ours[DRAWN]["same_answers"]) == (4.0, 0.2, False)
    assert ours[DRAWN]["arrivals"] == [0.0, 0.004]
    assert (ours["sent: in bursts %"]["median"], ours["sent: in bursts %"]["of_stock"]) == (0.0, None)
    assert all(one["same_answers"] for one in records if one["streams"] == 8)
    cells = list(table(records, 1).columns[2].cells)
    assert cells[list(MEASURES).index(DRAWN)] == "4 (4-5) 0.20x"
    assert cells[-1] == "NO"


def test_the_picture_needs_two_variants(tmp_path: Path) -> None:
    records = records_of({(n, v): rounds(10.0, 20.0) for n in (1, 4) for v in (STOCK, OURS)}, [STOCK, OURS])
    assert draw(tmp_path / "none.png", [one for one in records if one["variant"] == STOCK]) is None
    (tmp_path / "both.json").write_text(json.dumps({"results": records}))
    main(["--draw", str(tmp_path / "both.json")])
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_variants_are_named_between_semicolons_and_have_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).variants == list(DEFAULT)
    assert parse(["--variants", "ours; stock, spin loop ;stock"]).variants == ["ours", "stock, spin loop", "stock"]
    with pytest.raises(SystemExit):
        parse(["--variants", "ours"])
    assert "ratios are to it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--tokens", "1"])
    assert "--tokens: must be at least 2, got 1" in capsys.readouterr().err
    assert {name for name, variant in VARIANTS.items() if not variant.stock} == {
        name for name in VARIANTS if not name.startswith("stock")
    }


def test_a_paused_server_stands_still_and_ends_when_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pausing stops the child as well, which would keep a core busy beside the server that is measured."""
    program, up = tmp_path / "vllm", tmp_path / "up"
    child = "import signal; signal.pause()"
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, signal, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pathlib.Path({str(up)!r}).touch()\nsignal.pause()\n"  # it cannot be stopped before its child is a program
    )
    program.chmod(0o755)
    monkeypatch.setattr("benchmarks.harness.server.ROOT", tmp_path)

    def states(process: psutil.Process) -> set[str]:
        return {one.status() for one in (process, *process.children())}

    with ExitStack() as stack:
        server = Server(stack, str(tmp_path / "python"), tmp_path, [], log="paused", stock=True)
        process = psutil.Process(server.process.pid)
        until(up.exists)
        server.pause()
        until(lambda: states(process) == {psutil.STATUS_STOPPED})
        server.resume()
        until(lambda: psutil.STATUS_STOPPED not in states(process))
        server.pause()
        stack.callback(server.resume)
    assert server.process.exit_code is not None
    server.resume()  # does nothing any more
