"""Too few KV blocks: sessions are preempted in the middle, start over, and must say what they would have said.

Stock 0.29 and later cannot always serve this: it strips the data of items that a session has computed, and when the
session is preempted and its encoder outputs are evicted, the worker has nothing to encode again ("Encoder cache miss").
So the tokens are also compared with those of stock that has blocks in plenty.
"""

from __future__ import annotations

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.compare import first_difference, first_different_step
from tests.engine.harness.engines import VARIANTS, cases
from tests.engine.harness.scenarios import SCENARIOS

SHORT_OF_BLOCKS = cases((variant,) for variant in VARIANTS if variant.stock.startswith(("tight", "scarce")))


@pytest.mark.parametrize("variant", SHORT_OF_BLOCKS)
def test_preempted_sessions_say_what_they_would_have_said(in_process: Results, variant):
    ran = in_process.of_ours(variant.name, "crowd")
    assert sum(count for id_, count in ran["preempted"].items() if id_.startswith("session")) > 0
    expected = in_process.of_stock("sync", "crowd")["requests"]
    assert first_difference(expected, ran["requests"]) is None


@pytest.mark.parametrize("variant", SHORT_OF_BLOCKS)
def test_every_request_leaves_exactly_once(in_process: Results, variant):
    ran = in_process.of_ours(variant.name, "crowd")
    assert ran["left"] == {request.id: 1 for request in SCENARIOS["crowd"]().requests}
    assert ran["still_there"] == []


@pytest.mark.newest
def test_who_was_preempted_got_encodings_back_from_host_memory(in_process: Results):
    assert in_process.of_ours("scarce-host", "crowd")["tiers"]["host"] > 0


@pytest.mark.parametrize("engine", [pytest.param("tight", marks=pytest.mark.long), "tight-async"])
def test_same_decisions(in_process: Results, engine):
    """Where all encoder outputs stay cached stock survives, so the two can be compared step by step."""
    expected = in_process.of_stock(engine, "crowd")["steps"]
    assert sum("preempted" in step for step in expected) >= 4
    assert first_different_step(expected, in_process.of_ours(engine, "crowd")["steps"]) is None
