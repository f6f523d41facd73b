"""The file of the history of requests: what is written, what is left out, and where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.core.engine.test_core import FACTS, OnePrompt, View, picture
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.explanation import WaitCause, waits_of
from vllm_omni_sched.core.engine.history import Transition
from vllm_omni_sched.core.engine.history_lines import LINES_LOST, HistoryLine, entry_of, line_of
from vllm_omni_sched.engine.history_file import HistoryFile, path_of_rank
from vllm_omni_sched.graph.order import INTERACTIVE

WALL, MONOTONIC = 1_700_000_000.0, 50.0
Open = Callable[..., HistoryFile]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


@pytest.fixture
def opened(path: Path) -> Iterator[Open]:
    files = []

    def make(max_bytes: int = 1 << 20) -> HistoryFile:
        files.append(HistoryFile(path, max_bytes, lambda: WALL, lambda: MONOTONIC))
        return files[-1]

    yield make
    for file in files:
        file.close()


def entries(path: Path) -> list[HistoryLine]:
    return [entry_of(line) for line in path.read_bytes().splitlines()]


def test_a_core_writes_the_history_of_its_requests_by_the_wall_clock(path: Path, opened: Open) -> None:
    core = EngineCore(OmniSchedConfig(), FACTS, history=opened())
    core.enter("r", INTERACTIVE, MONOTONIC + 1)
    core.note(Transition.STARTED, "r", MONOTONIC + 2, "16")
    core.leave("r", 3, MONOTONIC + 4, "stopped")
    assert core.history is not None
    core.history.close()
    assert entries(path) == [
        HistoryLine(WALL + 1, "entered", "r", "interactive"),
        HistoryLine(WALL + 2, "started", "r", "16"),
        HistoryLine(WALL + 4, "left", "r", "stopped"),
    ]
    assert core.story("r") == ""  # nothing is kept in memory


def test_the_history_tells_that_a_request_waited_for_the_lane(path: Path, opened: Open) -> None:
    core = EngineCore(OmniSchedConfig(encode_ahead=True), FACTS, history=opened())
    ahead, view, prompt = core.ahead, View(num_decodes=1), OnePrompt("r", [picture("a"), picture("b", 100)])
    assert ahead is not None
    core.enter("r", INTERACTIVE, 100.0)
    view.queue.append(prompt)
    for now in (100.5, 101.0, 101.5):  # in each step it is asked again
        assert not ahead.next_chunk(prompt, 0, view, now).may_run
    for one in ahead.take_actions().submit:
        ahead.encoded(one.content, one.ticket, 0.1, 103.5)
    for one in ahead.take_actions().submit:
        ahead.encoded(one.content, one.ticket, 0.1, 103.5)
    assert ahead.next_chunk(prompt, 0, view, 104.0).may_run
    core.note(Transition.STARTED, "r", 104.0, "0")
    core.note(Transition.FIRST_TOKEN, "r", 104.25)
    assert core.history is not None
    core.history.close()
    assert waits_of(entries(path)) == {WaitCause.LANE: 3.0, WaitCause.QUEUE: 1.0, WaitCause.COMPUTING: 0.25}
    held = [one.detail for one in entries(path) if one.transition == "held"]
    assert held == ["for 2 items"]


def test_both_files_together_are_bounded(path: Path, opened: Open) -> None:
    history = opened(64 << 10)
    for number in range(2000):
        history.add(float(number), Transition.ENTERED, f"request-{number}", "batch")
    history.close()
    files = [path, path.with_name("history.jsonl.1")]
    assert sum(file.stat().st_size for file in files) <= 64 << 10
    assert entries(path)[-1].request_id == "request-1999"


def test_lines_that_were_lost_are_told(path: Path, opened: Open) -> None:
    path.mkdir()  # cannot be written
    history = opened()
    history.add(0.0, Transition.ENTERED, "r", "batch")
    while history._log._failed == 0:
        time.sleep(0.001)
    path.rmdir()
    history.add(1.0, Transition.LEFT, "r")
    history.close()
    assert [(one.transition, one.detail) for one in entries(path)] == [(LINES_LOST, "1"), ("left", "")]


def test_a_line_is_bounded_and_always_text() -> None:
    entry = entry_of(line_of(HistoryLine(1.0, "entered", "\ud800" + 600 * "x", 600 * "y")))
    assert (len(entry.request_id), len(entry.detail)) == (500, 500)
    with pytest.raises(ConfigError, match="not a line of a history of requests"):
        entry_of(b'{"at": "soon"}')


def test_each_engine_of_data_parallelism_has_its_own_file() -> None:
    assert [str(path_of_rank("/a/history.jsonl", rank)) for rank in (0, 1)] == [
        "/a/history.jsonl",
        "/a/history-1.jsonl",
    ]
