"""Every connector of ours is named wherever one has to be, and its options are read in one way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.connector_names import CONNECTORS
from vllm_omni_sched.connectors.extra import OPTIONS, check_extra

PAGE = Path(__file__).parents[3] / "docs" / "connectors.md"
INNER = "OmniBranchConnector"  # put around another one; nobody names it


def test_all_places_name_the_same_connectors() -> None:
    assert OPTIONS.keys() == CONNECTORS.keys() - {INNER}
    headings = {line.removeprefix("## ") for line in PAGE.read_text().splitlines() if line.startswith("## ")}
    assert OPTIONS.keys() - headings == set()


@pytest.mark.parametrize(
    ("name", "extra", "says"),
    [
        ("ArenaConnector", {"ring_byte": 5}, "unknown option 'at.ring_byte'; did you mean 'at.ring_bytes'?"),
        ("ArenaConnector", {"stal_seconds": 5}, "unknown option 'at.stal_seconds'; did you mean 'at.stall_seconds'?"),
        ("ArenaConnector", {"stall_seconds": 0}, "option 'at.stall_seconds': input should be greater than 0, got 0"),
        (
            "ArenaConnector",
            {"text": {"max_byte": 1}},
            "unknown option 'at.text.max_byte'; did you mean 'at.text.max_byt",
        ),
        ("ArenaConnector", {"directory": "here"}, "option 'at.directory': must be absolute: the processes of an arena"),
        (
            "CudaIpcConnector",
            {"arena": {"max_messages": 1}},
            "option 'at.arena.max_messages': .* nearest valid value is 64",
        ),
        ("MooncakePoolConnector", {"master": "here"}, "option 'at.master': 'here' is no address: give host:port"),
        ("OmniAutoConnector", {"tiers": {"disk": None}}, "option 'at.tiers': name a tier"),
        (
            "OmniAutoConnector",
            {"foreign": {"x": 3}},
            "option 'at.foreign.x' must be a mapping of name, distance, extra",
        ),
        ("OmniAutoConnector", {"foreign": {"x": {}}}, "option 'at.foreign.x.name' is missing: Name of the connector"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(name: str, extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says.replace('?', '[?]')}"):
        check_extra(name, extra, "at")


def test_what_is_not_ours_is_left_to_its_owner() -> None:
    assert check_extra("NixlConnector", {"ring_byte": 5}, "at") is None
    assert check_extra("ArenaConnector", {"codec_chunk_frames": 25, "stage_id": 1}, "at") == OPTIONS["ArenaConnector"]()
