"""The documentation says what the code says, builds without a warning, and fetches nothing from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.engine.preprocess.metrics import PREPROCESS_METRICS
from vllm_omni_sched.engine.video.metrics import VIDEO_METRICS
from vllm_omni_sched.monitor.metrics import METRICS
from vllm_omni_sched.monitor.stage_metrics import STAGE_METRICS

_SPEC = importlib.util.spec_from_file_location("generate", Path(__file__).parents[2] / "docs" / "generate.py")
generate = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)

ROOT = generate.ROOT
DOCS = ROOT / "docs"
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)#\s]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page):
    text = page.read_text()
    assert generate.filled(text) == text, "run: python docs/generate.py"


def test_every_generated_part_is_in_a_page_and_is_filled():
    found = [
        (part["name"], len(part[0].splitlines()))
        for page in generate.PAGES
        for part in generate.PART.finditer(page.read_text())
    ]
    assert {name for name, _ in found} == set(generate.PARTS)
    empty = {name for name, lines in found if lines == 2}  # nothing between the markers
    pictures = {
        *("home-picture", "readme-picture", "readme-serve-picture"),
        *("realtime-picture", "serve-picture"),
    }
    assert empty <= pictures  # there may be none yet


def test_check_fails_on_a_stale_page(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: metrics -->\nsomething old\n<!-- end -->\n")
    monkeypatch.setattr(generate, "PAGES", (page,))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "page.md: is not up to date" in capsys.readouterr().out
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    assert "something old" not in page.read_text()


@pytest.mark.parametrize("page", [*generate.PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    targets = [link["target"] for link in LINK.finditer(page.read_text()) if "://" not in link["target"]]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_site_builds_strictly_and_is_self_contained(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    pages = {page.stem: page.read_text() for page in tmp_path.glob("*.html")}
    assert {page.stem for page in DOCS.glob("*.md")} <= pages.keys()
    fetched = [
        m for text in pages.values() for m in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', text)
    ]
    assert fetched == []
    # from a folder the search reads a script, not a file, and works in a frame, not in a worker
    assert (tmp_path / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert '<script src="iframe-worker.js"></script>' in pages["index"]
    assert (tmp_path / "iframe-worker.js").is_file()
    assert list(tmp_path.rglob("*.py*")) == []
    shown = {}
    for page in tmp_path.rglob("*.html"):
        for source in re.findall(r'<img[^>]+src="([^":]+\.png)"', page.read_text()):
            shown[source] = (page.parent / source).is_file()
    assert len(shown) > 14
    assert [source for source, there in shown.items() if not there] == []


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_options_on_the_page_of_five_are_valid(tmp_path):
    page = (DOCS / "five-options.md").read_text()
    file = tmp_path / "omni_sched.yaml"
    file.write_text(page.split("```yaml\n")[1].split("```")[0])
    config = load_config({"omni_sched": str(file)})
    shown = [row.split("`")[1] for row in page.splitlines() if row.startswith("| `")]
    assert len(shown) == 5
    assert [name.partition(".")[0] for name in shown] == list(yaml.safe_load(file.read_text()))
    assert config.given == {name.partition(".")[0] for name in shown}


def test_the_metrics_of_the_symptoms_exist():
    table = (DOCS / "troubleshooting.md").read_text().split("## Symptoms")[1]
    cells = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ")][2:]
    endings = "total|pending|share|bytes|tokens|free|waiting"
    named = {name for cell in cells for name in re.findall(rf"`([a-z_]+_(?:{endings}))[`{{]", cell)}
    known = {one.name for one in (*METRICS, *STAGE_METRICS, *VIDEO_METRICS, *PREPROCESS_METRICS)}
    assert len(named) > 15
    assert named <= known


def test_every_test_that_a_page_names_exists():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for page in generate.PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_the_classes_that_decide_exist_and_number_their_rules():
    page = (DOCS / "contributing.md").read_text().split("### The file that decides")[1].split("### Folders")[0]
    rows = re.findall(r"^\| [^|]+\? \| `(vllm_omni_sched/[\w/]+\.py)` \| `(\w+)`", page, re.MULTILINE)
    assert len(rows) == 4
    for path, name in rows:
        docstring = re.search(rf'^class {name}\b[^\n]*\n    """(.*?)"""', (ROOT / path).read_text(), re.M | re.S)
        assert docstring, f"{path} defines no class {name} with a docstring"
        assert "\n    1. " in docstring[1], f"{name} in {path} does not number its rules"


def test_every_folder_of_the_package_has_a_line_in_contributing():
    page = (DOCS / "contributing.md").read_text()
    folders = [path.parent.name for path in (ROOT / "vllm_omni_sched").glob("*/__init__.py")]
    assert [name for name in folders if f"| `vllm_omni_sched/{name}` |" not in page] == []
