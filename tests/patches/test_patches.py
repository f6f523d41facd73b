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
from patches.series import Patch, Series

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
