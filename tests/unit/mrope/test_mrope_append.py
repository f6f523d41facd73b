"""M-RoPE positions that are continued are those vLLM computes from the whole prompt, by the models' own functions."""

from __future__ import annotations

import functools
import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.support.mrope import MODELS, Piece, image, make_model, model_class, text, updates
from vllm_omni_sched import compat
from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.engine import mrope_models
from vllm_omni_sched.engine.mrope import MropeAppendMixin, RopeStateMixin, continues
from vllm_omni_sched.engine.promote import mix_in
from vllm_omni_sched.engine.runner_v1 import RunnerV1Mixin
from vllm_omni_sched.engine.start import check_and_attach
from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.items import SessionMirror
from vllm_omni_sched.items.session import SessionUpdate

QWEN2 = "qwen2_vl.Qwen2VLForConditionalGeneration"
STRIP = compat.strip_feature()


def vllm_config(**changed: Any) -> SimpleNamespace:
    multimodal = SimpleNamespace(is_multimodal_pruning_enabled=lambda: changed.get("pruning", False))
    return SimpleNamespace(
        model_config=SimpleNamespace(uses_mrope=changed.get("uses_mrope", True), multimodal_config=multimodal),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp", pipeline_parallel_size=1),
    )


class Runner:
    """vLLM's own method, and how many tokens it was asked about."""

    uses_mrope = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config()
        self.asked: list[int] = []

    def get_model(self) -> Any:
        return self.model

    def load_model(self) -> None:
        pass

    def _init_mrope_positions(self, req_state: Any) -> None:
        self.asked.append(len(req_state.prompt_token_ids))
        GPUModelRunner._init_mrope_positions(self, req_state)

    def _update_states(self, scheduler_output: Any) -> None:
        pass


def make_runner(model: Any, **options: Any) -> Any:
    runner = Runner(model)
    mix_in(runner, RunnerV1Mixin, OmniSchedConfig(**options))
    runner.load_model()
    return runner


class Session:
    """A session as a worker's mirror has it, fed with pieces."""

    def __init__(self, request_id: str = "a") -> None:
        self.mirror = SessionMirror((), (), (), 0)
        self.state = CachedRequestState(
            req_id=request_id,
            prompt_token_ids=[],
            mm_features=[],
            sampling_params=None,
            generator=None,
            block_ids=(),
            num_computed_tokens=0,
            output_token_ids=[],
        )
        self.restart()

    def restart(self) -> None:
        """All of it is sent anew."""
        old = self.mirror
        self.mirror = SessionMirror(old.tokens, old.features, (), old.covered)
        self.state.prompt_token_ids, self.state.mm_features = self.mirror.tokens, self.mirror.features

    def add(self, pieces: list[Piece], covered: int | None = None) -> None:
        tokens: list[int] = []
        features = []
        for piece in pieces:
            if piece.modality is not None:
                name = str(len(self.mirror.features) + len(features))
                features.append(piece.feature(len(self.mirror.tokens) + len(tokens), name))
            tokens += piece.tokens
        self.add_raw(tokens, features, covered)

    def add_raw(self, tokens: list[int], features: list[Any], covered: int | None = None) -> None:
        covered = self.mirror.covered if covered is None else covered
        before = (len(self.mirror.tokens), len(self.mirror.features), ())
        update = SessionUpdate(*before, tokens, (), covered, {})
        self.mirror.apply(update, features, lambda feature: STRIP(feature, True))

    def expected(self, model: Any) -> tuple[torch.Tensor, int]:
        return model.get_mrope_input_positions(list(self.mirror.tokens), list(self.mirror.features))

    def check(self, model: Any) -> None:
        positions, delta = self.expected(model)
        assert self.state.mrope_positions.dtype == positions.dtype
        assert torch.equal(self.state.mrope_positions, positions)
        assert self.state.mrope_position_delta == delta


@pytest.mark.parametrize("name", MODELS)
def test_positions_of_a_session_are_those_of_the_whole_prompt(name):
    model = make_model(name)
    for seed in range(12):
        rng = random.Random(seed)
        runner, session = make_runner(model), Session()
        for pieces in updates(rng, name, 20):
            session.add(pieces, covered=rng.randint(session.mirror.covered, len(session.mirror.features)))
            before = session.state.mrope_positions
            known = 0 if before is None else before.shape[1]
            runner._init_mrope_positions(session.state)
            assert runner.asked[-1] == len(session.mirror.tokens) - known
            assert session.state.prompt_token_ids is session.mirror.tokens
            assert session.state.mm_features is session.mirror.features
            session.check(model)


def test_the_cut_may_be_anywhere_outside_items():
    model, rng = make_model(QWEN2), random.Random(1)
    pieces = [text(rng), image(rng), text(rng), image(rng), image(rng), text(rng)]
    whole = Session()
    whole.add(pieces)
    tokens, features = list(whole.mirror.tokens), whole.mirror.features
    for cut in range(1, len(tokens)):
        session, runner = Session(), make_runner(model)
        session.add_raw(tokens[:cut], [f for f in features if f.mm_position.offset < cut])
        runner._init_mrope_positions(session.state)
        session.add_raw(tokens[cut:], [f for f in features if f.mm_position.offset >= cut])
        runner._init_mrope_positions(session.state)
        session.check(model)
        inside = any(f.mm_position.offset < cut < f.mm_position.offset + f.mm_position.length for f in features)
        assert runner.asked == [cut, len(tokens) if inside else len(tokens) - cut]


def test_an_update_costs_what_is_new_however_long_the_session_is():
    model, rng = make_model(QWEN2), random.Random(0)
    runner, session = make_runner(model), Session()
    update = [text(rng), image(rng)]
    size = sum(len(piece.tokens) for piece in update)
    for _ in range(3000):
        session.add(update)
        runner._init_mrope_positions(session.state)
    assert set(runner.asked) == {size}
    rows = runner._omni_mrope_sessions["a"].rows
    assert rows.columns_copied <= 2 * len(session.mirror.tokens)
    session.check(model)


def test_an_update_without_tokens_asks_nothing():
    model = make_model(QWEN2)
    runner, session = make_runner(model), Session()
    session.add([text(random.Random(0))])
    runner._init_mrope_positions(session.state)
    session.add([])
    runner._init_mrope_positions(session.state)
    assert len(runner.asked) == 1
    session.check(model)


def _a_full_resend(session: Session) -> None:
    session.restart()


def _positions_from_elsewhere(session: Session) -> None:
    session.state.mrope_positions = session.state.mrope_positions.clone()


def _plain_lists(session: Session) -> None:
    session.state.prompt_token_ids = list(session.mirror.tokens)


def _an_item_in_what_is_known(session: Session) -> None:
    feature = Piece([0], "image", {"image_grid_thw": torch.tensor([1, 2, 2])}).feature(0, "late")
    session.mirror.features.append(feature)


@pytest.mark.parametrize("change", [_a_full_resend, _positions_from_elsewhere, _plain_lists, _an_item_in_what_is_known])
def test_what_is_not_a_continuation_is_computed_in_full(change):
    model, rng = make_model(QWEN2), random.Random(2)
    runner, session = make_runner(model), Session()
    for _ in range(2):
        session.add([text(rng)])
        runner._init_mrope_positions(session.state)
    session.add([text(rng), image(rng)])
    change(session)
    runner._init_mrope_positions(session.state)
    assert runner.asked[-1] == len(session.mirror.tokens)
    session.check(model)


def test_sessions_are_forgotten_when_they_end_and_ordinary_requests_never_kept():
    model, rng = make_model(QWEN2), random.Random(3)
    runner, session, other = make_runner(model), Session("a"), Session("b")
    other.state.prompt_token_ids = [1, 2, 3]
    session.add([text(rng)])
    for state in (session.state, other.state):
        runner._init_mrope_positions(state)
    assert list(runner._omni_mrope_sessions) == ["a"]
    MropeAppendMixin._update_states(runner, SimpleNamespace(finished_req_ids={"a", "c"}))
    assert runner._omni_mrope_sessions == {}


@pytest.mark.parametrize(
    "name",
    [
        "isaac.IsaacForConditionalGeneration",
        "qwen2_5_omni_thinker.Qwen2_5OmniThinkerForConditionalGeneration",
        "qwen3_omni_moe_thinker.Qwen3OmniMoeThinkerForConditionalGeneration",
        "minicpmv4_6.MiniCPMV4_6ForConditionalGeneration",
        "glm4v.GLM4VForCausalLM",
    ],
)
def test_other_models_are_computed_in_full(name):
    model = make_model(name)
    assert make_runner(model)._omni_mrope_sessions is None
    with pytest.raises(ConfigError, match=r"'mrope_append' is 'on' but cannot work: .* none of the models"):
        make_runner(model, mrope_append="on")


def test_every_model_that_was_read_is_recognised_in_this_vllm():
    read = {name for name in MODELS if mrope_models.why_recomputed(make_model(name)) is None}
    assert read == set(MODELS)
    assert set(mrope_models.VERIFIED) <= read


def _subclass(**functions: Any) -> Any:
    model = make_model(QWEN2)
    model.__class__ = type("Fork", (model_class(QWEN2),), functions)
    return model


def _patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    original = model_class(QWEN2).iter_mm_grid_thw

    @functools.wraps(original)
    def wrapper(*args: Any) -> Any:
        return original(*args)

    monkeypatch.setattr(model_class(QWEN2), "iter_mm_grid_thw", wrapper)
    return make_model(QWEN2)


def _own(self: Any, *args: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: _subclass(), None),
        (lambda _: _subclass(iter_mm_grid_thw=_own), "Fork has a iter_mm_grid_thw of its own"),
        (lambda _: _subclass(get_mrope_input_positions=_own), "none of the models"),
        (_patched, "differs from those that were read"),
        (lambda _: torch.nn.Linear(1, 1), "computes no M-RoPE positions"),
    ],
)
def test_a_changed_function_is_another_function(monkeypatch, make, reason):
    found = mrope_models.why_recomputed(make(monkeypatch))
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({}, {}, None),
        ({"uses_mrope": False}, {}, "the model has no M-RoPE"),
        ({"pruning": True}, {}, "video pruning"),
        ({}, {"session_delta": "off"}, "sessions reach the workers in full"),
    ],
)
def test_on_refuses_where_auto_recomputes(changed, options, reason):
    config, model = vllm_config(**changed), make_model(QWEN2)
    assert not continues(OmniSchedConfig(mrope_append="off", **options), config, model)
    assert continues(OmniSchedConfig(**options), config, model) is (reason is None)
    if reason is None:
        assert continues(OmniSchedConfig(mrope_append="on", **options), config, model)
    else:
        with pytest.raises(ConfigError, match=reason):
            continues(OmniSchedConfig(mrope_append="on", **options), config, model)


def test_on_is_refused_before_any_engine_starts():
    config = vllm_config(uses_mrope=False)
    config.scheduler_config = SimpleNamespace(scheduler_cls="vllm_omni_sched.OmniScheduler", async_scheduling=True)
    config.additional_config = {"omni_sched": {"mrope_append": "on"}}
    with pytest.raises(ConfigError, match="the model has no M-RoPE"):
        check_and_attach(config)


class Rows:
    """A `StagedWriteTensor` whose writes need no device; counts what is written."""

    def __init__(self, rows: int, columns: int) -> None:
        self.gpu = np.full((rows, columns), -1)
        self.written = 0

    def stage_write(self, index: int, start: int, x: list[int]) -> None:
        self.gpu[index, start : start + len(x)] = x
        self.written += len(x)


def make_rope_state(slots: int) -> Any:
    state = object.__new__(RopeState)
    state.num_dims, state.has_delta = 3, True
    state.prefill_positions = Rows(slots * 3, 4000)
    state.prefill_delta = SimpleNamespace(np=np.zeros(slots, dtype=np.int32))
    mix_in(state, RopeStateMixin, OmniSchedConfig())
    return state


@pytest.mark.parametrize("name", MODELS)
def test_runner_v2_writes_only_what_its_row_lacks(name):
    """Sessions move between rows, rows are taken by others and sessions are sent anew, by seed."""
    model = make_model(name)
    for seed in range(8):
        rng, state = random.Random(seed), make_rope_state(4)
        rows, holds = state.prefill_positions, {}
        sessions = [Session("a"), Session("b")]
        for pieces in updates(rng, name, 40):
            session, slot = rng.choice(sessions), rng.randrange(3)
            if rng.random() < 0.1:
                session.restart()
            if rng.random() < 0.1:
                state.init_prefill_positions(slot, model, [1, 2, 3], [])
                holds.pop(slot, None)
            session.add(pieces)
            mirror, before = session.mirror, rows.written
            state.init_prefill_positions(slot, model, mirror.tokens, list(mirror.features))
            held, length = holds.get(slot, (None, 0))
            assert rows.written - before == 3 * (len(mirror.tokens) - (length if held is mirror.tokens else 0))
            holds[slot] = mirror.tokens, len(mirror.tokens)
            positions, delta = session.expected(model)
            assert np.array_equal(rows.gpu[slot * 3 : slot * 3 + 3, : len(mirror.tokens)], positions.numpy())
            assert state.prefill_delta.np[slot] == delta
        assert state.prefill_positions is rows


def test_rows_do_not_keep_a_prompt_alive():
    state, model = make_rope_state(1), make_model(QWEN2)
    state.init_prefill_positions(0, model, array("q", [1, 2, 3]), [])
    assert state._omni_rows[0].tail(array("q", [1, 2, 3]), []) is None
