"""Check how several processes of pytest share the tests."""

import pytest

from tests.support.sharing import group_of

UPSTREAM = "tests/upstream/test_upstream.py"


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/unit/test_logs.py::test_a_name", "tests/unit/test_logs.py"),
        ("tests/engine/test_same_tokens.py::test_any[sync]", "in_process"),
        (
            "tests/upstream/test_upstream.py::test_any[async-tests/v1/core/test_scheduler.py]",
            "tests/upstream/test_upstream.py async",
        ),
        ("tests/upstream/test_upstream.py::test_any[async]", "tests/upstream/test_upstream.py async"),
        ("tests/upstream/test_upstream.py::test_any[RunnerV1Mixin-sync]", "tests/upstream/test_upstream.py sync"),
    ],
)
def test_tests_that_share_engines_are_of_one_group(test: str, group: str) -> None:
    assert group_of(test) == group
