"""Check what the repository says about itself: continuous integration, hooks, templates, citation, security."""

from __future__ import annotations

import re
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_files_that_others_read_fit_their_schemas(schema: str, pattern: str, tmp_path: Path) -> None:
    def check(*files: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    files = sorted(ROOT.glob(pattern))
    done = check(*files)
    assert files
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / files[0].name
    wrong.write_text(files[0].read_text() + "\nnonsense: {}\n")
    assert check(wrong).returncode == 1


def test_hooks_are_the_checks_of_make_lint() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    entries = [re.sub(r" --force-exclude$", "", hook["entry"]) for hook in local["hooks"]]
    recipe = subprocess.run(["make", "--dry-run", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lint = [line.removesuffix(" .") for line in recipe.splitlines() if line.startswith(".venv/bin/")]
    assert entries[: len(lint)] == lint
    assert entries[len(lint) :] == [".venv/bin/python docs/generate.py --check"]


@pytest.mark.parametrize("template", ["bug", "feature"])
def test_a_template_asks_for_what_is_needed_once(template: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{template}.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names)
    assert any(field.get("validations", {}).get("required") for field in fields)


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
