"""The scheduler's extension and its parts, without vLLM: requests and schedulers are what the protocols name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_sched.engine.encoder.inputs import EncoderInputs, Inputs
from vllm_omni_sched.engine.extension import SchedulerExtension
from vllm_omni_sched.engine.refusals import Refusals
from vllm_omni_sched.engine.sessions.registry import Sessions, StrandedSessions
from vllm_omni_sched.items import FeatureList
from vllm_omni_sched.monitor.counts import SchedulerMetrics

RUNNING = object()


@dataclass(frozen=True)
class Item:
    mm_position: Any
    data: Any = None


def item(offset: int, length: int, data: Any = None) -> Item:
    return Item(SimpleNamespace(offset=offset, length=length), data)


@dataclass
class Request:
    request_id: str = "r"
    mm_features: list[Any] = field(default_factory=list)
    resumable: bool = False
    status: object = RUNNING
    client_index: int = 0
    num_prompt_tokens: int = 8
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_in_flight_tokens: int = 0

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return int(self.mm_features[input_id].mm_position.length)


class Scheduler:
    """vLLM's part of a step: it records what it is asked, and answers with what it was shown."""

    def __init__(self, *requests: Request) -> None:
        self.requests: dict[str, Any] = {request.request_id: request for request in requests}
        self.encoder_cache_manager: Any = SimpleNamespace()
        self.connector: Any = None
        self._pending_encoder_input_ids: dict[str, Any] = {}
        self.asked: list[tuple[int, int, int]] = []  # items shown, computed tokens, new tokens

    def finish_requests(self, request_ids: Any, finished_status: Any) -> None:
        for request_id in request_ids:
            del self.requests[request_id]

    def try_schedule(self, request: Any, num_computed: int, num_new: int, budget: int, shift: int) -> Inputs:
        self.asked.append((len(request.mm_features), num_computed, num_new))
        ids = list(range(len(request.mm_features))) if num_new else []
        return ids, num_new, budget - len(ids), []


def index(request: Any) -> bool:
    request.mm_features = FeatureList(request.mm_features)
    return False


def make_inputs(metrics: SchedulerMetrics | None = None, *, narrows: bool = True, native: bool = True) -> EncoderInputs:
    return EncoderInputs(
        narrows=narrows,
        native_windows=native,
        running=RUNNING,
        index=index,
        metrics=metrics or SchedulerMetrics(),
    )


def make_extension(**parts: Any) -> SchedulerExtension:
    metrics, refusals = SchedulerMetrics(), Refusals()
    return SchedulerExtension(
        metrics,
        make_inputs(metrics),
        Sessions(refusals),
        refusals,
        parts.pop("sort_update", lambda update: False),
        **parts,
    )


def test_no_part_imports_vllm() -> None:
    """Importing the extension where vLLM cannot be imported works, as does a step of it."""
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "from vllm_omni_sched.engine.extension import SchedulerExtension\n"
        "from vllm_omni_sched.engine.encoder.inputs import EncoderInputs\n"
        "from vllm_omni_sched.engine.refusals import Refusals\n"
        "from vllm_omni_sched.engine.sessions.registry import Sessions\n"
        "from vllm_omni_sched.monitor.counts import SchedulerMetrics\n"
        "m, r = SchedulerMetrics(), Refusals()\n"
        "i = EncoderInputs(narrows=True, native_windows=True, running=0, index=bool, metrics=m)\n"
        "print(SchedulerExtension(m, i, Sessions(r), r, bool).schedule(None, lambda: 'output'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "output\n", done.stderr


def test_the_manager_comes_back_when_vllm_fails() -> None:
    request = Request(mm_features=FeatureList([item(0, 8), item(2, 2), item(8, 4)]))
    scheduler = Scheduler(request)
    manager = scheduler.encoder_cache_manager

    def fail(*args: Any) -> Inputs:
        assert scheduler.encoder_cache_manager is not manager
        raise RuntimeError("vLLM")

    with pytest.raises(RuntimeError, match="vLLM"):
        make_inputs().decide(scheduler, fail, request, 8, 4, 100, 0)
    assert scheduler.encoder_cache_manager is manager


def test_a_late_update_of_a_session_is_refused_alone() -> None:
    extension = make_extension()
    for request in (Request("s", resumable=True), Request("text")):
        extension.admit(request, {})
        extension.leave(request)
    extension.admit(Request("text"), {})
    assert not extension.refusals.refused
    extension.admit(Request("s", resumable=True, client_index=3), {})
    assert extension.refusals.refused == {"s": 3}


@pytest.mark.parametrize(
    ("computed", "finished", "kept"),
    [(0, False, True), (5, False, False), (0, True, False)],
    ids=["preempted", "running", "finished"],
)
def test_which_stopped_sessions_are_put_back(computed: int, finished: bool, kept: bool) -> None:
    stranded = StrandedSessions()
    session = Request(resumable=True, num_computed_tokens=computed)
    assert stranded.stopped(session, lambda _: finished) is finished
    assert stranded.requests == ([session] if kept else [])
