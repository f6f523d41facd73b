"""A file that cannot work is refused by ``doctor`` and at the start alike, before a stage starts; good ones by neither.

The files are those of `tests/support/stage_files.py`; `harness/refused_files.py` tries them in one process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from dev.child_process import ChildProcess
from tests.engine.harness.processes import ROOT, write_model
from tests.omni.harness.processes import omni_environment, start_warm
from tests.support.stage_files import GOOD, REFUSED

pytestmark = [pytest.mark.omni, pytest.mark.slow]

ALONE = [name for name, case in REFUSED.items() if case.alone]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what ``doctor`` and the engine say about each file."""
    folder = tmp_path_factory.mktemp("files")
    log = tmp_path_factory.mktemp("log") / "log"
    model = write_model("llama", ROOT / ".models" / "llama")
    command = [sys.executable, "-m", "tests.omni.harness.refused_files", str(folder), str(model)]
    with ChildProcess(command, log=log, env=omni_environment(), start=start_warm) as process:
        assert process.wait() == 0, "\n".join(process.last_lines(40))
        found: dict[str, Any] = json.loads(process.last_lines(1)[0])
    assert found.keys() == REFUSED.keys() | GOOD.keys()
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse_it_with_the_same_words_that_name_its_key(outcomes: dict[str, Any], name: str) -> None:
    found = outcomes[name]
    problem, *_ = found["doctor"]  # which lists all; the start raises the first
    assert [words for words in REFUSED[name].says if words not in problem] == []
    assert problem in found["start"]


@pytest.mark.parametrize("name", ALONE)
def test_without_the_deploy_yaml_too_where_no_pipeline_is_needed_for_it(outcomes: dict[str, Any], name: str) -> None:
    found = outcomes[name]
    problem, *_ = found["alone"]
    assert [words for words in REFUSED[name].says if words not in problem] == []
    assert problem in found["alone_start"]


@pytest.mark.parametrize("name", GOOD)
def test_good_files_pass_both(outcomes: dict[str, Any], name: str) -> None:
    assert (outcomes[name]["doctor"], outcomes[name]["start"]) == ([], None)
