"""Whether device tensors stay on their device: the rules, one a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_omni_sched.connectors.cuda_ipc.share import Load, ShareReason, plan

SEES, BLIND = frozenset({"a", "b"}), frozenset({"c"})
GOOD = Load("a", 100, [SEES], 0)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (GOOD, ShareReason.SHARED),
        (replace(GOOD, receivers=[SEES, SEES]), ShareReason.SHARED),
        (replace(GOOD, nbytes=99), ShareReason.SMALL),
        (replace(GOOD, nbytes=1000), ShareReason.SHARED),  # exactly what may be held
        (replace(GOOD, nbytes=1001), ShareReason.HELD),
        (replace(GOOD, held_bytes=900), ShareReason.SHARED),
        (replace(GOOD, held_bytes=901), ShareReason.HELD),
        (replace(GOOD, receivers=[]), ShareReason.NO_RECEIVER),
        (replace(GOOD, receivers=[BLIND]), ShareReason.UNREACHABLE),
        (replace(GOOD, receivers=[SEES, BLIND]), ShareReason.UNREACHABLE),  # either may get the message
        (replace(GOOD, receivers=[SEES, frozenset()]), ShareReason.UNREACHABLE),
        (replace(GOOD, receivers=[frozenset(), BLIND]), ShareReason.UNREACHABLE),
        (replace(GOOD, receivers=[frozenset(), frozenset()]), ShareReason.NO_RECEIVER),  # no device is in use there yet
        (replace(GOOD, obstacle=ShareReason.ALLOCATOR), ShareReason.ALLOCATOR),
        (replace(GOOD, obstacle=ShareReason.ALLOCATOR, nbytes=1), ShareReason.SMALL),
    ],
)
def test_rules(load: Load, expected: ShareReason) -> None:
    assert plan(load, min_bytes=100, max_held_bytes=1000) is expected


def test_nothing_may_be_held() -> None:
    assert plan(GOOD, min_bytes=1, max_held_bytes=0) is ShareReason.HELD
