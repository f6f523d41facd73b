"""Check what `benchmarks.streaming` makes of what its client has read, and how it keeps a server from running."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.server import Server
from benchmarks.streaming.client import read, request_id
from benchmarks.streaming.server import CPU, MEASURES, NAME, READY, ROLES, measured
from tests.support.until import until

SECONDS = dict.fromkeys((f"{kind}, {role}" for kind in (CPU, READY) for role in ROLES), 0.006)


def event(*token_ids: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "", "token_ids": list(token_ids)}]}).encode() + b"\n"


def lines(*events: tuple[float, tuple[int, ...]]) -> list[tuple[float, bytes]]:
    found = [(at, event(*token_ids)) for at, token_ids in events]
    return [*found, (found[-1][0], b'data: {"choices": []}\n'), (found[-1][0], b"data: [DONE]\n")]


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
