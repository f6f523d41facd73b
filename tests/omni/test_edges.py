"""Connectors that only the options of the stage scheduler name carry what stages send."""

from __future__ import annotations

import pytest

from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import TEXT_TO_SOUND
from tests.omni.conftest import Ran
from tests.omni.connectors import ARENA, Connector
from tests.omni.test_stages import stock

pytestmark = pytest.mark.slow

UNNAMED = Connector("")  # in the deploy YAML
SCHEDULING = {"runtime": {"connectors": {"ours": {"name": "ArenaConnector", "extra": ARENA}}}}


def test_the_arena_named_in_our_options_alone_carries_what_stages_send(ran: Ran):
    how = {"scheduling": SCHEDULING, "scenarios": ("one_by_one", "connected")}
    found = ran(TEXT_TO_SOUND, "full_payload", UNNAMED, **how).results["scenarios"]
    assert found["connected"]["connectors"] == ["ArenaConnector"] * 3
    assert first_difference(stock(ran, "one_by_one"), found["one_by_one"]) is None
