"""Under vLLM's front end in Rust, which runs no plugins, an engine starts with what works there, and says the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.processes import OUR_PLUGIN, run_program
from tests.engine.harness.rust_front_end import CASES
from vllm_omni_sched import OmniScheduler
from vllm_omni_sched.resource.engine.profile import RUST
from vllm_omni_sched.testing import make_item, make_request, make_scheduler

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def outcomes(qwen2_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    log = tmp_path_factory.mktemp("rust") / "log"
    found: dict[str, dict[str, Any]] = run_program(
        "tests.engine.harness.rust_front_end", qwen2_vl, environment=OUR_PLUGIN, log=log
    )
    assert found.keys() == CASES.keys()
    return found


@pytest.mark.parametrize(
    ("case", "options", "left_out", "loader"),
    [
        ("defaults", {"metrics": False, "slo_metrics": False, "encode_ahead": False}, ["metrics"], None),
        ("no metrics", {"metrics": False, "slo_metrics": False, "encode_ahead": False}, [], None),
        ("chat", {"metrics": False, "slo_metrics": False, "encode_ahead": True}, ["metrics", "slo_metrics"], None),
        (
            "video",
            {"metrics": False, "slo_metrics": False, "encode_ahead": True},
            ["metrics", "slo_metrics", "omni_flashcodec"],
            None,
        ),
        ("video, in Python", {"metrics": True, "slo_metrics": True, "encode_ahead": True}, [], "omni_flashcodec"),
    ],
)
def test_what_the_operator_did_not_name_is_left_out_with_the_reason(
    outcomes: dict[str, dict[str, Any]],
    case: str,
    options: dict[str, bool],
    left_out: list[str],
    loader: str | None,
) -> None:
    assert outcomes[case] == {
        "options": options,
        "left_out": [f"{name} stays off, because {RUST}" for name in left_out],
        "loader": loader,
    }


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("metrics", "option 'metrics'"),
        ("slo metrics", "option 'slo_metrics'"),
        ("preprocessing", "option 'preprocess.processes'"),
        ("loader", "video loader 'omni_flashcodec'"),
        ("loader by variable", "video loader 'omni_flashcodec'"),
    ],
)
def test_what_the_operator_named_is_refused_with_the_reason(
    outcomes: dict[str, dict[str, Any]], case: str, names: str
) -> None:
    assert outcomes[case]["error"] == "ConfigError"
    assert outcomes[case]["message"].startswith(f"{names} cannot work here, because {RUST}: leave ")
    assert "unset VLLM_USE_RUST_FRONTEND" in outcomes[case]["message"]


@pytest.mark.parametrize("rust", [False, True])
def test_the_engine_refuses_what_no_front_end_has_checked(monkeypatch: pytest.MonkeyPatch, *, rust: bool) -> None:
    """The one in Python refuses a class that clients may not name with HTTP 400; that in Rust passes it on."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", str(int(rust)))
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", "/bin/false")
    scheduler: Any = make_scheduler(OmniScheduler, options={"waiting_order": "sla"})
    for request_id, extra in (("realtime", {"omni_class": "realtime"}), ("batch", {"omni_class": "batch"})):
        request = make_request(request_id, 8, [make_item(1, 4, request_id)])
        request.sampling_params.extra_args = extra
        scheduler.add_request(request)
    assert list(scheduler.omni.refusals.refused) == (["realtime"] if rust else [])
