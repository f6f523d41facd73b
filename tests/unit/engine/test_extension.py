"""The scheduler's extension and its parts, without vLLM: requests and schedulers are what the protocols name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_sched.engine.encoder.inputs import EncoderInputs, Inputs
from vllm_omni_sched.engine.encoder.pending import HeldInputs, PendingInputs
from vllm_omni_sched.engine.extension import STEPS_PER_SAMPLE, SchedulerExtension
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


# -- encoder inputs --------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "computed", "new", "shown", "answer"),
    [
        # first tokens, in order: vLLM's own list and its own search
        ([item(0, 4), item(4, 4)], 0, 8, (2, 0, 8), ([0, 1], 8)),
        # every item is computed: a chunk without tokens, and the tokens that were asked for
        ([item(0, 4), item(4, 4)], 8, 1, (2, 8, 0), ([], 1)),
        # nested items: those of the window alone, under the request's own ids
        (FeatureList([item(0, 8), item(2, 2), item(8, 4)]), 8, 4, (1, 8, 4), ([2], 4)),
    ],
    ids=["first tokens", "decode", "nested"],
)
def test_what_vllm_is_shown(features: list[Any], computed: int, new: int, shown: Any, answer: Any) -> None:
    request = Request(mm_features=features, num_computed_tokens=computed)
    scheduler = Scheduler(request)
    manager = scheduler.encoder_cache_manager
    found = make_inputs().decide(scheduler, scheduler.try_schedule, request, computed, new, 100, 0)
    assert scheduler.asked == [shown]
    assert (found[0], found[1]) == answer
    assert scheduler.encoder_cache_manager is manager


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


def test_a_request_behind_a_prefix_gets_an_index() -> None:
    inputs = make_inputs()
    waiting = Request(mm_features=[item(0, 4), item(4, 4)], status=object())
    scheduler = Scheduler(waiting)
    inputs.decide(scheduler, scheduler.try_schedule, waiting, 4, 4, 100, 0)
    assert isinstance(waiting.mm_features, FeatureList)
    assert inputs.num_indexed == 1


# -- pending inputs --------------------------------------------------------


def never(*args: Any) -> Any:
    raise AssertionError("vLLM's own search was asked")


def test_text_asks_nothing_about_pending_inputs() -> None:
    request = Request()
    scheduler = Scheduler(request)
    new = SimpleNamespace(req_id="r", mm_features=[], num_computed_tokens=0)
    pending = PendingInputs(by_range=True, strip=lambda feature: feature)
    assert pending.updates(scheduler, never, {"r": 8}, [new], {}) == {}


def test_ranges_and_sets_side_by_side() -> None:
    """Items in order become a range; nested ones stay with vLLM, which is asked about their request alone."""
    ordered = Request("a", [item(0, 4, {"x": 1}), item(4, 4, {"x": 2})])
    nested = Request("b", FeatureList([item(0, 8, {"x": 3}), item(2, 2, {"x": 4})]))
    text = Request("c")
    scheduler = Scheduler(ordered, nested, text)
    asked: list[Any] = []

    def ask(scheduled: Any, new_requests: Any, encoder_inputs: Any) -> Any:
        asked.append((dict(scheduled), [new.req_id for new in new_requests]))
        for new in new_requests:
            scheduler._pending_encoder_input_ids[new.req_id] = {0, 1}
        return {}

    pending = PendingInputs(by_range=True, strip=lambda feature: feature)
    news = [
        SimpleNamespace(req_id=request.request_id, mm_features=request.mm_features, num_computed_tokens=0)
        for request in (ordered, nested, text)
    ]
    scheduled = {"a": 8, "b": 8, "c": 8}
    assert pending.updates(scheduler, ask, scheduled, news, {"a": [0, 1], "b": [0, 1]}) == {}
    assert isinstance(scheduler._pending_encoder_input_ids["a"], HeldInputs)
    assert asked == [({"b": 8}, ["b"])]
    ordered.num_computed_tokens = 8
    assert pending.updates(scheduler, ask, {"a": 1, "b": 1, "c": 1}, [], {}) == {"a": {0: None, 1: None}}
    assert asked[1:] == [({"b": 1}, [])]


# -- a step ----------------------------------------------------------------


class Policies:
    """Records the order in which a step calls its policies."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def schedule(self, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("plan")
        output = schedule(*args, **kwargs)
        self.calls.append("apply")
        return output

    def decide(self, *args: Any) -> Inputs:
        self.calls.append("decide")
        return ()

    def observe(self, scheduler_output: Any, outputs: Any) -> None:
        self.calls.append("observe")

    def enter(self, request: Any) -> None:
        self.calls.append("enter")

    def leave(self, request: Any) -> None:
        self.calls.append("leave")


def test_a_step_with_policies() -> None:
    policies = Policies()
    extension = make_extension(policies=policies)
    scheduler, request = Scheduler(), Request()
    extension.admit(request, scheduler.requests)
    extension.schedule(scheduler, lambda: policies.calls.append("vLLM"))
    assert extension.deciding is policies
    extension.updated(scheduler, None, {})
    extension.leave(request)
    assert policies.calls == ["enter", "plan", "vLLM", "apply", "observe", "leave"]


def test_one_step_of_sixteen_is_timed() -> None:
    extension, scheduler = make_extension(), Scheduler()
    for _ in range(3 * STEPS_PER_SAMPLE):
        assert extension.schedule(scheduler, lambda: "output") == "output"
    assert extension.metrics.steps == 3 * STEPS_PER_SAMPLE
    assert sum(extension.metrics.schedule_seconds.counts) == 3


@pytest.mark.parametrize(
    ("request_", "index_all", "kind"),
    [
        (Request(), True, list),
        (Request(mm_features=[item(0, 4)]), False, list),
        (Request(mm_features=[item(0, 4)]), True, FeatureList),
        (Request(mm_features=[item(0, 8), item(2, 2)]), False, FeatureList),
        (Request(resumable=True), False, FeatureList),
    ],
    ids=["text", "in order", "all are indexed", "nested", "session"],
)
def test_whose_items_are_indexed(request_: Request, index_all: bool, kind: type) -> None:
    extension = make_extension(index_all=index_all)
    extension.admit(request_, {})
    assert type(request_.mm_features) is kind
    assert extension.inputs.num_indexed == (kind is FeatureList)
    assert extension.sessions.ids == ({"r"} if request_.resumable else set())
    extension.leave(request_)
    assert extension.inputs.num_indexed == 0
    assert not extension.sessions.ids


def test_a_late_update_of_a_session_is_refused_alone() -> None:
    extension = make_extension()
    for request in (Request("s", resumable=True), Request("text")):
        extension.admit(request, {})
        extension.leave(request)
    extension.admit(Request("text"), {})
    assert not extension.refusals.refused
    extension.admit(Request("s", resumable=True, client_index=3), {})
    assert extension.refusals.refused == {"s": 3}


def test_a_rewound_request_gets_its_items_again() -> None:
    items = [item(0, 4, "a"), item(4, 4, "b")]
    request = Request(mm_features=FeatureList(items))
    request.mm_features.as_sent(8, lambda feature: item(0, 4))
    extension = make_extension(gives_back=True)
    assert extension._restore([request]) == {"r": dict(enumerate(items))}
    assert extension.metrics.restored_items == 2
    assert make_extension(gives_back=False).cached_requests(Scheduler(), "data", [], [request]) == "data"


# -- stranded sessions -----------------------------------------------------


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
