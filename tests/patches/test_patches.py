"""The patches apply to the releases they are for, exactly, and say what they should.

What takes longer, vLLM's own tests on the patched trees and random workloads, is `make patches`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from patches import sources
from patches.check import check_round_trip, drift
from patches.series import Patch, PatchError, Series, git_apply

PATCHES = [patch for version in Series.versions() for patch in Series.read(version).patches]


@pytest.fixture(params=Series.versions())
def series(request: pytest.FixtureRequest) -> Series:
    return Series.read(request.param)


@pytest.fixture
def pristine(series: Series) -> Path:
    try:
        return sources.fetch_source(series.version)
    except sources.SourceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.path.parent.name}/{patch.path.stem}")
def test_header(patch: Patch) -> None:
    assert patch.lint() == []


def test_series_lists_every_patch_once(series: Series) -> None:
    assert series.lint() == []
    assert series.patches


def test_every_version_has_a_known_source(series: Series) -> None:
    assert series.version in sources.VERSIONS


def test_applies_exactly_and_reverses_to_the_same_bytes(series: Series, pristine: Path) -> None:
    assert check_round_trip(series, pristine) == []


def test_what_each_patch_mends_is_in_its_release(series: Series, pristine: Path) -> None:
    assert {patch.name: drift(patch, series, series.version) for patch in series.patches} == {
        patch.name: "applies" for patch in series.patches
    }


def test_named_tests_exist_on_the_patched_tree(series: Series, pristine: Path) -> None:
    added = set(series.touched())
    assert [test for test in series.tests() if test not in added and not (pristine / test).is_file()] == []


def test_patched_source_leaves_the_pristine_tree_alone(series: Series, pristine: Path) -> None:
    def digests() -> Iterator[tuple[str, str]]:
        for path in series.touched():
            if (pristine / path).is_file():
                yield path, hashlib.sha256((pristine / path).read_bytes()).hexdigest()

    before = dict(digests())
    tree = sources.patched_source(series.version)
    assert dict(digests()) == before
    assert all((tree / path).read_bytes() for path in series.touched())
    assert any((tree / path).read_bytes() != (pristine / path).read_bytes() for path in before)
    assert sources.patched_source(series.version) == tree


GOOD = """\
Say what it does

Why: a cost
Upstream: not yet proposed
Touches: vllm/a.py, tests/test_a.py
Tests: tests/test_a.py
Mends: vllm/a.py :: slow()
Remove-when: it is gone
Without-it: 1 ms,
 with it 0.1 ms
---
diff --git a/vllm/a.py b/vllm/a.py
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -2,3 +2,3 @@
 one
-slow()
+fast()
 three
diff --git a/tests/test_a.py b/tests/test_a.py
new file mode 100644
--- /dev/null
+++ b/tests/test_a.py
@@ -0,0 +1 @@
+assert True
"""


def write_patch(folder: Path, text: str, name: str = "make-it-fast.patch") -> Patch:
    path = folder / name
    path.write_text(text)
    return Patch.read(path)


def test_lint_accepts_a_complete_patch(tmp_path: Path) -> None:
    patch = write_patch(tmp_path, GOOD)
    assert patch.lint() == []
    assert patch.fields["Without-it"] == "1 ms, with it 0.1 ms"
    assert patch.mends() == ("vllm/a.py", "slow()")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("Why: a cost\n", "", "no Why"),
        ("Upstream: not yet proposed", "Upstream:", "no Upstream"),
        ("Why: a cost", "Why: a cost\nBecause: of it", "unknown field Because"),
        ("Say what it does", "Say what it does.", "the first line"),
        ("Touches: vllm/a.py, ", "Touches: ", "Touches and the files"),
        ("vllm/a.py :: slow()", "vllm/a.py", "Mends is not"),
        ("+fast()", "+fast() ", "space at the end"),
    ],
)
def test_lint_finds(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert old in GOOD
    faults = write_patch(tmp_path, GOOD.replace(old, new)).lint()
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_lint_finds_a_numbered_name(tmp_path: Path) -> None:
    assert len(write_patch(tmp_path, GOOD, "01-fast.patch").lint()) == 1


def test_apply_is_exact_and_all_or_nothing(tmp_path: Path) -> None:
    patch = write_patch(tmp_path, GOOD)
    tree = tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True)
    source = tree / "vllm" / "a.py"

    source.write_text("zero\none\nslow()\nthree\n")
    git_apply(patch, tree)
    assert source.read_text() == "zero\none\nfast()\nthree\n"
    git_apply(patch, tree, "--reverse")
    assert source.read_text() == "zero\none\nslow()\nthree\n"
    assert not (tree / "tests" / "test_a.py").exists()

    source.write_text("-1\nzero\none\nslow()\nthree\n")
    with pytest.raises(PatchError, match="not where it says"):
        git_apply(patch, tree)

    source.write_text("zero\none\nslow()\nfour\n")
    with pytest.raises(PatchError, match="does not apply"):
        git_apply(patch, tree, exact=False)
    assert source.read_text() == "zero\none\nslow()\nfour\n"


def test_unknown_version_is_named() -> None:
    with pytest.raises(sources.SourceError, match=r"no vLLM 0\.1\.0 here"):
        sources.fetch_source("0.1.0")
