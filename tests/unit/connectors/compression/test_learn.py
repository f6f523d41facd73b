"""What is learnt of codecs and links, and where samples are taken."""

import numpy as np
import pytest

from tests.support.buffers import flat
from vllm_omni_sched.connectors.compression.codec import Kind
from vllm_omni_sched.connectors.compression.decide import Ledger, Measured, sample

HERE, THERE = ("0->1", Kind.IDS, "int64"), ("0->2", Kind.IDS, "int64")


def test_a_codec_is_known_once_it_went_both_ways():
    ledger = Ledger(reprobe_every=9)
    ledger.encoded(HERE, "a", 100, 25, 1.0)
    assert ledger.measured(HERE, "a") is None
    ledger.decoded(HERE, "a", 100, 0.5)
    assert ledger.measured(HERE, "a") == Measured(0.25, 0.01, 0.005)
    assert ledger.measured(HERE, "b") is None
    assert ledger.measured(THERE, "a") is None


def test_later_buffers_move_the_average():
    ledger = Ledger(reprobe_every=9)
    ledger.decoded(HERE, "a", 100, 1.0)
    for size in (20, 70):
        ledger.encoded(HERE, "a", 100, size, 1.0)
    assert ledger.measured(HERE, "a").size_fraction == pytest.approx(0.3)


def test_declining_is_not_shrinking():
    ledger = Ledger(reprobe_every=9)
    ledger.encoded(HERE, "a", 100, None, 1.0)
    assert ledger.measured(HERE, "a") == Measured(1.0, 0.01, 0.0)


def test_probes_are_due_after_so_many_buffers_of_a_stream():
    ledger = Ledger(reprobe_every=3)
    assert [ledger.count(HERE) for _ in range(8)] == [False, False, False, True, False, False, True, False]
    assert not ledger.count(THERE)


@pytest.mark.parametrize(
    ("shape", "sample_bytes", "sampled", "first"),
    [
        ((100,), 40, (20,), 40),  # int16: 20 elements from the middle
        ((100,), 4, (8,), 46),
        ((10, 50), 200, (8, 50), 50),  # 8 rows at least
        ((100, 5), 100, (10, 5), 225),
        ((4, 25, 5), 100, (10, 5), 225),
        ((3,), 4096, (3,), 0),
        ((1, 600_000), 64, (32,), 299_984),  # a row of more than 1 MiB is cut
        ((), 64, (1,), 0),
    ],
)
def test_samples(shape, sample_bytes, sampled, first):
    values = np.arange(int(np.prod(shape))).astype(np.int16)
    part, part_shape = sample(flat(values), "int16", shape, sample_bytes)
    assert part_shape == sampled
    assert part.size == 2 * int(np.prod(sampled))
    assert part.view(np.int16)[0] == values[first]
