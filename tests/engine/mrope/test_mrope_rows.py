"""Runner V2's rows of M-RoPE positions get only what they lack."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.worker.gpu.mm.rope import RopeState

from tests.support.mrope import MODELS, make_model, updates
from tests.support.mrope_session import QWEN2, Session
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.runners.extension import mix_in
from vllm_omni_sched.engine.runners.v2 import RopeStateMixin


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
    assert state.omni.rows[0].tail(array("q", [1, 2, 3]), []) is None
