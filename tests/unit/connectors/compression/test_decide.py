"""`decide`, rule by rule."""

import pytest

from vllm_omni_sched.connectors.compression.decide import Candidate, Measured, Reason, Snapshot, decide
from vllm_omni_sched.connectors.compression.options import Mode

MB = 1_000_000
HALF = Measured(0.5, 1e-9, 1e-9)  # to half, at 1 GB/s each way: as fast as a link of 250 MB/s
TENTH = Measured(0.1, 1e-8, 1e-8)
LARGER = Measured(1.0, 1e-12, 1e-12)


def plan(*candidates, link=MB, num_bytes=MB, **more):
    return decide(Snapshot(num_bytes, link, candidates, **more))


def lossless(measured=HALF, name="a"):
    return Candidate(name, False, measured)


def lossy(measured=HALF, name="int8"):
    return Candidate(name, True, measured)


@pytest.mark.parametrize("candidates", [(), (lossless(None),), (lossless(),)])
def test_1_raw_when_off_small_or_on_shared_memory_whatever_the_codecs(candidates):
    assert plan(*candidates, mode=Mode.OFF).reason is Reason.OFF
    assert plan(*candidates, min_bytes=MB + 1).reason is Reason.TOO_SMALL
    assert plan(*candidates, num_bytes=0).reason is Reason.TOO_SMALL
    assert plan(*candidates, link=None, probe_due=True).reason is Reason.SHARED_MEMORY


def test_2_raw_when_no_codec_takes_it_or_is_allowed():
    assert plan().reason is Reason.NO_CODEC
    assert plan(lossy()).reason is Reason.LOSSY_NOT_ALLOWED
    assert plan(lossy(), lossy=("fp8")).reason is Reason.LOSSY_NOT_ALLOWED
    assert plan(lossy(), lossy="int8").codec == "int8"


def test_3_what_is_not_measured_is_probed_first_and_all_when_it_is_due():
    found = plan(lossless(), lossless(None, "b"), lossy(None))
    assert (found.reason, found.probe, found.codec) == (Reason.PROBE, ("b",), None)
    assert plan(lossless(), lossless(TENTH, "b"), lossy(), probe_due=True).probe == ("a", "b")


def test_4_raw_when_nothing_makes_it_smaller():
    assert plan(lossless(LARGER)).reason is Reason.DOES_NOT_SHRINK
    assert plan(lossless(LARGER), mode=Mode.ALWAYS).reason is Reason.DOES_NOT_SHRINK
    assert plan(lossless(LARGER), mode=Mode.ALWAYS, link=None).reason is Reason.DOES_NOT_SHRINK


@pytest.mark.parametrize(
    ("link", "codec"), [(1e6, "b"), (2e7, "b"), (3e7, "a"), (1.9e8, "a"), (2.1e8, None), (1e10, None)]
)
def test_5_and_6_the_codec_that_takes_least_time_if_it_is_less_than_raw(link, codec):
    # at 22.2 MB/s both take as long, and at 200 MB/s `a` takes as long as raw: faster links are left to raw
    found = plan(lossless(HALF), lossless(TENTH, "b"), link=link)
    assert found.codec == codec
    assert found.reason is (Reason.LINK_FASTER if codec is None else Reason.PAYS)
    assert found.raw_seconds == MB / link
    assert (found.compressed_seconds < found.raw_seconds) is (codec is not None)


@pytest.mark.parametrize(("num_bytes", "codec"), [(60_000, None), (80_000, "a"), (MB, "a")])
def test_6_a_small_buffer_is_sent_raw_where_a_large_one_pays(num_bytes, codec):
    # at 50 MB/s `a` gains 8 ns for each byte, half a millisecond with 62,500 of them
    assert plan(lossless(), link=5e7, num_bytes=num_bytes).codec == codec


def test_5_the_first_wins_a_tie():
    assert plan(lossless(), lossless(HALF, "b"), lossy(), lossy="int8").codec == "a"


def test_6_always_is_always():
    assert plan(lossless(), link=1e12, mode=Mode.ALWAYS).codec == "a"
    found = plan(lossless(), lossless(TENTH, "b"), link=None, mode=Mode.ALWAYS)
    assert (found.codec, found.reason) == ("b", Reason.ALWAYS)
