"""The texts of the pull requests: their snippets run on the release, and show there what the texts say.

The snippets print times. Here their clock counts how often an item of the request is looked at instead.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from patches import sources
from patches.series import ROOT
from patches.upstream import python_for

VERSION = "0.33.0"
PAGES = sorted((ROOT / "docs" / "upstream").glob("*.md"))
SIZES = (1024, 8192, 32768)

COUNTING_CLOCK = """
import functools
import timeit
from vllm.multimodal.inputs import MultiModalFeatureSpec

visits = 0

def count(item, name):
    global visits
    visits += name == "mm_position"
    return object.__getattribute__(item, name)

MultiModalFeatureSpec.__getattribute__ = count
timeit.repeat = functools.partial(timeit.repeat, timer=lambda: visits / 1e3)
timeit.timeit = functools.partial(timeit.timeit, timer=lambda: visits / 1e3)
"""


@pytest.fixture(scope="module")
def trees() -> dict[str, Path]:
    try:
        return {"before": sources.fetch_source(VERSION), "after": sources.patched_source(VERSION)}
    except sources.SourceError as error:
        pytest.skip(str(error))


def visits(page: Path, tree: Path) -> list[int]:
    """Run the snippet of a page on a tree, and return how often it looks at an item, by size."""
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len([line for line in snippet.splitlines() if line]) <= 10
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "VLLM_PLUGINS": ""}
    command = [python_for(VERSION), "-W", "ignore", "-c", COUNTING_CLOCK + snippet]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = re.findall(r"^ *([\d,]+) items: +([\d.]+) ms", result.stdout, re.MULTILINE)
    assert [int(size.replace(",", "")) for size, _ in lines] == list(SIZES)
    return [round(float(number)) for _, number in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippet_visits_every_item_before_and_few_after(page: Path, trees: dict[str, Path]) -> None:
    before, after = visits(page, trees["before"]), visits(page, trees["after"])
    assert all(number >= size * 0.99 for number, size in zip(before, SIZES, strict=True))
    assert max(after) < 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_names_a_patch_and_tests_that_exist(page: Path, trees: dict[str, Path]) -> None:
    text = page.read_text()
    patches = re.findall(rf"`(patches/{VERSION}/[\w-]+\.patch)`", text)
    tests = set(re.findall(r"tests/v1/[\w/]+(?:\.py)?", text))
    assert patches
    assert tests
    assert [path for path in patches if not (ROOT / path).is_file()] == []
    assert [path for path in tests if not (trees["after"] / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tests_of_the_patch_are_in_files_of_vllm_and_shorter_than_the_change(
    page: Path, trees: dict[str, Path]
) -> None:
    (name,) = set(re.findall(rf"patches/({VERSION}/[\w-]+\.patch)", page.read_text()))
    added: dict[str, int] = {}
    for line in (ROOT / "patches" / name).read_text().splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
            assert (trees["before"] / path).is_file()
        elif line.startswith("+"):
            where = path.split("/")[0]
            added[where] = added.get(where, 0) + 1
    assert set(added) == {"tests", "vllm"}
    assert added["tests"] < added["vllm"]
