"""The texts of the pull requests: their snippets run on the release, and show there what the texts say.

The snippets print times. Here their clock counts how often an item of the request is looked at instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patches import sources
from patches.series import ROOT
from patches.upstream import python_for
from tests.support.tree_programs import Ended, run_on_tree

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


def snippet(page: Path) -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def ended(trees: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    """Run the snippets of all pages on both trees."""
    programs = [["-c", COUNTING_CLOCK + snippet(page)] for page in PAGES]
    return {
        name: run_on_tree(tree, programs, tmp_path_factory.mktemp(name), python=python_for(VERSION))
        for name, tree in trees.items()
    }


def visits(program: Ended) -> list[int]:
    """Return how often a snippet looked at an item, by size."""
    assert program.exit_code == 0, program.output[-2000:]
    lines = re.findall(r"^ *([\d,]+) items: +([\d.]+) ms", program.output, re.MULTILINE)
    assert [int(size.replace(",", "")) for size, _ in lines] == list(SIZES)
    return [round(float(number)) for _, number in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippet_visits_every_item_before_and_few_after(page: Path, ended: dict[str, list[Ended]]) -> None:
    assert len([line for line in snippet(page).splitlines() if line]) <= 10
    before, after = (visits(ended[name][PAGES.index(page)]) for name in ("before", "after"))
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
