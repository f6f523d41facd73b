"""M-RoPE positions that are continued are those vLLM computes from the whole prompt, by the models' own functions."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.mrope import MODELS, Piece, image, make_model, text, updates
from tests.support.mrope_session import QWEN2, Session, make_runner


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
    rows = runner.omni.positions._sessions["a"].rows
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
    positions = runner.omni.positions
    assert "a" in positions
    assert len(positions) == 1
    positions.forget({"a", "c"})
    assert len(positions) == 0
