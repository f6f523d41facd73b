"""Who chooses our video loader, however he does, gets it with the model's own sampling rule; who does not, has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.processes import OUR_PLUGIN, run_program
from tests.engine.harness.video_choice import CASES

pytestmark = pytest.mark.once

OURS = {"video_backend": "omni_flashcodec"}


@pytest.fixture(scope="module")
def outcomes(qwen2_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the outcomes of the cases in `harness/video_choice.py`."""
    log = tmp_path_factory.mktemp("video_choice") / "log"
    found: dict[str, dict[str, Any]] = run_program(
        "tests.engine.harness.video_choice", qwen2_vl, environment=OUR_PLUGIN, log=log
    )
    assert found.keys() == CASES.keys()
    return found


@pytest.mark.parametrize(
    ("case", "video"),
    [
        ("arguments", {"num_frames": 4, "sampling": "qwen2_vl", **OURS}),
        ("variable", {"sampling": "qwen2_vl", **OURS}),
        ("variable-and-arguments", {"num_frames": 4, "sampling": "qwen2_vl", **OURS}),
        ("rule", {"sampling": "opencv_dynamic", **OURS}),
        ("models-configuration", {"sampling": "nemotron_vl", **OURS}),
        ("variable-and-models-configuration", {"sampling": "nemotron_vl", **OURS}),
        ("options", {"sampling": "qwen2_vl", **OURS}),
    ],
)
def test_chosen_it_decodes_what_the_model_s_own_rule_samples(outcomes, case, video):
    assert outcomes[case]["video"] == video
    assert (outcomes[case]["started"], outcomes[case]["refused"]) == (1, False)
    assert outcomes[case]["arguments_kept"]


@pytest.mark.parametrize(
    ("case", "video"),
    [
        ("neither", {"num_frames": 4}),
        ("other-loader", {"video_backend": "opencv"}),
        ("models-configuration-alone", {"video_backend": "nemotron_vl"}),
    ],
)
def test_not_chosen_it_is_not_there(outcomes, case, video):
    assert outcomes[case] == {
        "video": video,
        "arguments_kept": True,
        "started": 0,
        "refused": True,
        "frames": ["off", 0],
        "options": None,
    }


def test_options_are_read(outcomes):
    assert outcomes["options"]["options"] == {"decoders": 1, "nice": 5}


@pytest.mark.parametrize(
    ("case", "frames"),
    [
        ("options", ["off", 0]),
        ("device-frames", ["on_device", 1]),
        ("device-frames-off", ["off", 0]),
        ("device-frames-read-on-the-host", ["device_processor_on_host", 0]),
        ("device-frames-sent-through-the-host", ["device_transport", 0]),
        ("device-frames-without-engines", ["device_no_engines", 0]),
    ],
)
def test_frames_stay_where_vllm_reads_them(outcomes, case, frames):
    assert outcomes[case]["frames"] == frames
    assert outcomes[case]["started"] == 1


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("other-decoder", "and the decoder 'torchcodec', which would decode in its place: leave out"),
        ("no-such-rule", "sampling is 'qwen2_vll', which is none of vLLM's sampling rules: name one of ['"),
        ("unknown-option", "unknown option 'video.decodres'; did you mean 'video.decoders'?"),
        ("wrong-option", "option 'video.nice': input should be less than or equal to 19, got 30; the nearest valid"),
        ("wrong-option-unchosen", "option 'video.nice'"),
    ],
)
def test_what_cannot_work_is_refused_at_start_up(outcomes, case, says):
    assert outcomes[case]["error"] == "ConfigError"
    assert says in outcomes[case]["message"]
