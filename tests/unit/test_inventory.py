"""The inventory is a promise: every override names a test that is there."""

from pathlib import Path

import pytest

from vllm_omni_sched.inventory import INVENTORY, Override

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("entry", INVENTORY, ids=lambda entry: entry.symbol)
def test_every_override_has_its_test(entry: Override):
    assert (ROOT / entry.test).exists()
    assert all((entry.delta, entry.guard, entry.remove_when))


def test_no_symbol_is_listed_twice():
    symbols = [entry.symbol for entry in INVENTORY]
    assert len(symbols) == len(set(symbols))
