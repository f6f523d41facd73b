"""The connector of stages that branch: an output goes where its name says, and a join gets all its inputs as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

from tests.support.omni_engines import CONNECTOR, Edges
from vllm_omni_sched.config.errors import ConnectorError
from vllm_omni_sched.omni import branch_connector
from vllm_omni_sched.omni.branch_connector import OmniBranchConnector, address

pytestmark = pytest.mark.omni

DIAMOND = [[0, 1], [0, 2], [1, 3], [2, 3]]


def connectors(*stages: int, **more: Any) -> tuple[Edges, list[OmniBranchConnector]]:
    edges = Edges()
    config = {"connector": CONNECTOR, "extra": {"edges": edges}, "edges": DIAMOND, **more}
    return edges, [OmniBranchConnector({**config, "stage_id": stage}) for stage in stages]


def put(connector: OmniBranchConnector, stage: int, name: str, payload: Any, piece: int = 0) -> tuple[bool, int, Any]:
    """Send as the worker of a stage does."""
    return connector.put(str(stage), str(stage + 1), f"{name}_{stage}_{piece}", payload)


def get(connector: OmniBranchConnector, stage: int, name: str, piece: int = 0) -> Any:
    """Receive as the worker of a stage does."""
    found = connector.get(str(stage - 1), str(stage), f"{name}_{stage - 1}_{piece}")
    return None if found is None else found[0]


def last(chunk: dict[str, Any]) -> dict[str, Any]:
    """Mark a chunk as vLLM-Omni does."""
    return chunk | {"meta": {"finished": torch.tensor(True), "is_segment_finished": torch.tensor(False)}}


@pytest.mark.parametrize("request_id", ["a", "a_b_0", "with > and ~1", "a>0:1_0_0"])
def test_an_output_goes_to_the_stages_that_its_name_lists(request_id: str) -> None:
    edges, (thinker, talker, painter) = connectors(0, 1, 2)
    assert put(thinker, 0, address(request_id, "", {1: "", 2: "~4"}), {"x": 1}) == (True, 2, None)
    assert get(painter, 2, address(request_id, "", {3: ""})) is None  # that run is over
    assert get(painter, 2, address(request_id, "~4", {3: ""})) == {"x": 1}
    assert get(talker, 1, address(request_id, "", {})) == {"x": 1}
    assert edges.lying == {}


def test_a_run_with_a_name_of_its_own_sends_to_the_runs_of_its_request() -> None:
    _, (thinker, talker) = connectors(0, 1)
    put(thinker, 0, address("a", "~12", {1: "~3"}), {"x": 1})
    assert get(talker, 1, address("a", "~3", {})) == {"x": 1}


def test_a_join_gets_the_payloads_of_all_that_it_reads_as_one() -> None:
    edges, (talker, painter, film) = connectors(1, 2, 3)
    name = address("a", "", {3: ""})
    put(painter, 2, name, {"codes": {"ref": 2}, "pictures": [1]})
    assert get(film, 3, address("a", "", {})) is None
    put(talker, 1, name, {"codes": {"audio": 1}})
    assert get(film, 3, address("a", "", {})) == {"codes": {"audio": 1, "ref": 2}, "pictures": [1]}
    assert (edges.lying, film._arrived) == ({}, {})


def test_a_value_that_several_send_is_that_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    _, (talker, painter, film) = connectors(1, 2, 3)
    for number in range(2):
        name = address(f"a{number}", "", {3: ""})
        put(painter, 2, name, {"codes": {"audio": 2}, "sound": 2})
        put(talker, 1, name, {"codes": {"audio": 1}, "sound": 1})
        assert get(film, 3, address(f"a{number}", "", {})) == {"codes": {"audio": 1}, "sound": 1}
    said = [record.getMessage() for record in caplog.records if "from several of the stages" in record.getMessage()]
    assert said == [
        f"stage 3 gets {name!r} from several of the stages that it reads; that of stage 2 is not used"
        for name in ("codes.audio", "sound")
    ]


def test_payloads_without_names_cannot_be_joined() -> None:
    _, (talker, painter, film) = connectors(1, 2, 3)
    put(painter, 2, address("a", "", {3: ""}), [2])
    put(talker, 1, address("a", "", {3: ""}), {"codes": 1})
    with pytest.raises(ConnectorError, match=r"payload of stage 2 has no names .* it is list, and must be a dict"):
        get(film, 3, address("a", "", {}))


def test_each_reader_gets_its_own_copy_of_each_chunk_at_its_own_pace() -> None:
    edges, (thinker, talker, painter) = connectors(0, 1, 2, chunked=[1, 2])
    for piece in range(3):
        put(thinker, 0, address("a", "", {1: "", 2: "~4"}), {"x": piece}, piece)
    assert [get(talker, 1, address("a", "", {}), piece) for piece in range(2)] == [{"x": 0}, {"x": 1}]
    assert [get(painter, 2, address("a", "~4", {}), piece) for piece in range(3)] == [{"x": 0}, {"x": 1}, {"x": 2}]
    assert get(talker, 1, address("a", "", {}), 2) == {"x": 2}
    assert edges.lying == {}


def test_a_stage_that_reads_several_in_chunks_gets_one_chunk_when_all_have_ended() -> None:
    edges, (talker, painter, film) = connectors(1, 2, 3, chunked=[1, 2, 3])
    name, reader = address("a", "", {3: ""}), address("a", "", {})
    put(talker, 1, name, {"codes": {"audio": torch.tensor([1, 2])}, "meta": {"finished": torch.tensor(False)}})
    put(painter, 2, name, last({"codes": {"ref": [7]}}))
    assert get(film, 3, reader) is None
    put(talker, 1, name, {"codes": {"audio": torch.tensor([3])}}, 1)
    assert get(film, 3, reader) is None
    put(talker, 1, name, last({}), 2)
    found = get(film, 3, reader)
    assert found["codes"]["audio"].tolist() == [1, 2, 3]
    assert found["codes"]["ref"] == [7]
    assert bool(found["meta"]["finished"])
    assert get(film, 3, reader, 1) is None
    assert (edges.lying, film._chunks) == ({}, {})


def test_a_chunk_may_replace_what_came_before() -> None:
    _, (talker, painter, film) = connectors(1, 2, 3, chunked=[3])
    name = address("a", "", {3: ""})
    put(talker, 1, name, {"embed": {"decode": [1]}, "speaker": "x", "sum": [1]})
    put(
        talker,
        1,
        name,
        {"embed": {"decode": [2]}, "sum": [3], "meta": {"override_keys": [["embed", "decode"], "sum"]}},
        1,
    )
    put(talker, 1, name, last({"speaker": "y", "sum": [4]}), 2)
    put(painter, 2, name, last({}))
    found = get(film, 3, address("a", "", {}))
    assert (found["embed"], found["speaker"], found["sum"]) == ({"decode": [2]}, "y", [3, 4])


def test_chunks_that_do_not_tell_whether_they_are_the_last_are_refused() -> None:
    _, (talker, film) = connectors(1, 3, chunked=[3])
    put(talker, 1, address("a", "", {3: ""}), [1])
    with pytest.raises(ConnectorError, match="stage 3 reads several stages in chunks, and chunk 0 of stage 1 is list"):
        get(film, 3, address("a", "", {}))


def test_what_was_sent_to_several_stages_is_withdrawn_from_all() -> None:
    """vLLM-Omni withdraws the chunks of an aborted request, from connectors of its own class alone."""
    edges, (thinker,) = connectors(0)
    edges.cleanup = lambda key: edges.lying.pop(key, None)  # type: ignore[attr-defined]
    put(thinker, 0, address("a", "", {1: "", 2: "~4"}), {"x": 1}, 5)
    assert sorted(edges.lying) == ["a@1_0_5", "a~4@2_0_5"]
    assert isinstance(thinker, SharedMemoryConnector)
    thinker.cleanup(f"{address('a', '', {1: '', 2: '~4'})}_0_5")
    assert edges.lying == {}


def test_inputs_for_which_nobody_asks_any_more_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(branch_connector, "monotonic_seconds", lambda: now)
    _, (talker, film) = connectors(1, 3)
    put(talker, 1, address("a", "", {3: ""}), {"x": 1})
    assert get(film, 3, address("a", "", {})) is None
    assert len(film._arrived) == 1
    now = branch_connector.KEPT_SECONDS + 1
    assert get(film, 3, address("b", "", {})) is None
    assert {run for _, run in film._arrived} == {"b"}


def test_what_cannot_be_sent_to_one_stage_is_reported() -> None:
    edges, (thinker,) = connectors(0)
    plain = edges.put
    edges.put = lambda source, target, key, data: (  # type: ignore[method-assign]
        plain(source, target, key, data) if target == "1" else (False, 0, None)
    )
    assert put(thinker, 0, address("a", "", {1: "", 2: ""}), {"x": 1}) == (False, 0, None)
