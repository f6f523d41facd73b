"""Check what the repository says about itself: continuous integration, hooks, templates, citation, security."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni_sched import __version__
from vllm_omni_sched.config.options import OmniSchedConfig

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]+)(?:#([^)\s]+))?\)")
PAGES = ("SECURITY.md", "CODE_OF_CONDUCT.md", "README.md")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def targets_of_make() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_continuous_integration_runs_the_suites_and_may_only_read() -> None:
    workflow = read(".github/workflows/ci.yml")
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    made = [command for command in commands if command.startswith("make ")]
    assert made == ["make check", "make test", "make test-cuda"]
    assert {command.split()[1] for command in made} <= targets_of_make()
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    actions = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action) for action in actions)  # a tag may be moved
    checkouts = [
        step for job in workflow["jobs"].values() for step in job["steps"] if "checkout" in step.get("uses", "")
    ]
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_the_citation_names_this_version_and_license() -> None:
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in LINK.findall((ROOT / page).read_text()):
        found = ROOT / target
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{target}#{anchor}"


def test_the_threat_model_names_options_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", text))
    elsewhere = {"omni_class", "omni_flashcodec"}  # what requests say, and the video loader
    assert len(named) > 6
    assert named - elsewhere <= set(OmniSchedConfig.model_fields)


def test_the_threat_model_has_every_file_and_folder_that_an_option_names() -> None:
    shared = (ROOT / "SECURITY.md").read_text().split("### What another user of the host may do")[1].split("###")[0]
    files = {name for name in OmniSchedConfig.model_fields if name.endswith(("_path", "_dir"))}
    assert "history_path" in files
    assert [name for name in sorted(files) if not re.search(rf"`(expert\.)?{name}`", shared)] == []
