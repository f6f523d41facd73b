"""Each mistake is one clear error at the earliest point; the engine and other requests are unharmed."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.compare import first_difference
from tests.engine.harness.engines import TOO_LONG
from tests.engine.harness.processes import OUR_PLUGIN, run_program
from tests.engine.harness.refusals import ACCEPTED, NEED_NO_MODEL, REFUSED, TWICE, UNWARNED, WARNED
from tests.engine.harness.scenarios import SCENARIOS
from tests.engine.harness.server import Server
from tests.engine.harness.spec import OURS

ENGINES = ["bad-input", "bad-input-async", pytest.param("bad-input-no-prefix", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def outcomes(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return `{case: {"error": class, "message": text} or None}` for the cases of `harness/refusals.py`."""
    folder = tmp_path_factory.mktemp("refusals")
    log = tmp_path_factory.mktemp("log") / "refusals.log"
    return run_program("tests.engine.harness.refusals", llava, folder, environment=OUR_PLUGIN, log=log)


@pytest.mark.once
@pytest.mark.parametrize("case", REFUSED)
def test_configuration_is_refused(outcomes, case):
    expected, outcome = REFUSED[case], outcomes[case]
    assert outcome is not None
    assert outcome["error"] == expected.error
    assert [words for words in expected.says if words not in outcome["message"]] == []
    assert expected.error == "ValidationError" or "\n" not in outcome["message"]


@pytest.mark.once
@pytest.mark.parametrize("case", [*NEED_NO_MODEL, *TWICE])
def test_doctor_refuses_what_needs_no_model_with_the_same_words(outcomes, case):
    assert outcomes[f"doctor of {case}"] == [outcomes[case]["message"]]


@pytest.mark.once
@pytest.mark.parametrize("case", [name for name, case in ACCEPTED.items() if case.circumstance == "none"])
def test_doctor_accepts_what_starts(outcomes, case):
    assert outcomes[f"doctor of {case}"] == []


@pytest.mark.once
@pytest.mark.parametrize("case", ACCEPTED)
def test_configuration_is_accepted(outcomes, case):
    assert outcomes[case] is None


@pytest.mark.parametrize("case", WARNED)
def test_options_without_the_scheduler_have_one_warning(outcomes, case):
    """In both environments: the early check is where the versions of vLLM differ most."""
    (said,) = outcomes[case]
    assert said.startswith(f"Options of omni_sched are given {WARNED[case].says[0]}, but --scheduler-cls is not ")
    assert "they have no effect. Add --scheduler-cls vllm_omni_sched.OmniScheduler" in said


@pytest.mark.parametrize("case", UNWARNED)
def test_there_is_no_warning_where_options_have_an_effect(outcomes, case):
    assert outcomes[case] == []


@pytest.fixture(scope="module")
def refused_servers(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Server]:
    """Two `vllm serve` that were told something wrong, after they have ended."""
    logs = tmp_path_factory.mktemp("refused")
    told = {
        "unknown option": {"omni_sched": {"sesion_delta": "off"}},
        "no such file": {"omni_sched": str(logs / "none.yaml")},
    }
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                Server(
                    llava,
                    ["--scheduler-cls", OURS, "--max-model-len", "1024", "--additional-config", json.dumps(config)],
                    {},
                    log=logs / f"{name}.log",
                )
            )
            for name, config in told.items()
        }
        for server in servers.values():
            server.wait_until_it_ends()
    return servers


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("unknown option", "unknown option 'sesion_delta'; did you mean 'expert.session_delta'?"),
        ("no such file", "none.yaml', which cannot be read: No such file or directory"),
    ],
)
def test_vllm_serve_ends_with_one_clear_line(refused_servers, server, says):
    process = refused_servers[server].process
    assert process.exit_code not in (0, None)
    lines = [line for line in process.last_lines(1000) if "ConfigError: " in line]
    assert lines == process.last_lines(1)
    assert says in lines[0]
    assert "EngineCore" not in process.log.read_text()  # it never came to starting one


def assert_only_one_ended(heard: dict) -> None:
    """Check the answers to the scenario `too_long`: its session has an error in place of its third answer."""
    assert heard["too-long"]["ends"] == ["length", "length", "error"]
    assert len(heard["too-long"]["tokens"]) == 2 * 3
    assert [len(heard[id_]["tokens"]) for id_ in ("has-room", "beside")] == [40, 200]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_session_that_grows_too_long_ends_alone(in_process: Results, engine):
    ran = in_process.of_ours(engine, TOO_LONG)
    assert_only_one_ended(ran["requests"])
    assert ran["left"] == {"too-long": 1, "has-room": 1, "beside": 1}
    assert ran["still_there"] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_for_a_session_that_has_ended_is_an_error_of_that_session_alone(in_process: Results, engine):
    ran = in_process.of_ours(engine, "straggler")
    heard = ran["requests"]
    for id_ in ("late", "later"):
        assert (heard[id_]["tokens"], heard[id_]["finish_reason"]) == ([], "error")
    assert [len(heard[id_]["tokens"]) for id_ in ("ended", "goes-on", "after")] == [3, 24, 8]
    assert ran["left"] == {"ended": 1 + 2, "goes-on": 1, "after": 1}
    assert ran["still_there"] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_session_beside_the_refused_update_hears_what_it_would_have_heard(in_process: Results, engine):
    """`quick` of the scenario `sessions` is sent the same pictures and texts as `goes-on`."""
    goes_on = in_process.of_ours(engine, "straggler")["requests"]["goes-on"]
    quick = in_process.of_stock("sync", "sessions")["requests"]["quick"]
    assert first_difference({"session": quick}, {"session": goes_on}) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_items_out_of_order_are_answered_rightly(in_process: Results, engine):
    """Ask some pictures, then others under the same texts: the prefix cache must not confuse them."""
    got = in_process.of_ours(engine, "reversed_images")["requests"]
    first = in_process.of_stock("sync", "images")["requests"]
    again = {f"{id_}-again": answer for id_, answer in in_process.of_stock("sync", "other_images")["requests"].items()}
    assert first_difference(first | again, got) is None
    assert len(SCENARIOS["reversed_images"]().requests) == len(first) + len(again)
