"""vLLM's model runner V2 with our mixins, with its tensors on an asynchronous device.

`runner_actor.py` runs vLLM's own classes, in a process for each test. Values are compared with those of the host bit by
bit, and each guard of order or lifetime is taken away in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_double import with_vllm
from tests.support.arrangements import ARRANGEMENTS
from tests.support.processes import Process, Processes

FAULT = pytest.mark.parametrize("fault", [False, True], ids=["as it is", "with the fault"])
NUM_SMS = pytest.mark.parametrize("num_sms", [None, 16], ids=["stream", "green context"])


@pytest.fixture(scope="module")
def runners() -> Iterator[Processes]:
    with_vllm.site_packages()  # told here, and not by a program that ends
    processes = Processes("tests.cuda_double.runner_actor", {"VLLM_LOGGING_STREAM": "ext://sys.stderr"})
    yield processes
    processes.close()


@pytest.fixture
def runner(runners: Processes) -> Iterator[Process]:
    yield runners.start()
    runners.end()


def test_without_an_environment_with_vllm_the_error_says_what_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(with_vllm, "WITH_VLLM", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no vLLM.*`make test-cuda` builds it"):
        with_vllm.site_packages()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_gather_asks_nothing_of_the_device_and_finds_what_the_slow_way_finds(runner: Any, arrangement: str) -> None:
    """The gather ends while the device stands still: it copies, launches, records and waits for nothing."""
    found = runner.gather(arrangement, 1, "as it is")
    assert found == {"ended": True, "asked": {}, "wrong": 0, "touched": 0}


@pytest.mark.parametrize("cache", ["synchronising", "copying"])
def test_a_gather_that_would_wait_for_the_device_is_noticed(runner: Any, cache: str) -> None:
    found = runner.gather("in order", 1, cache)
    assert not found["ended"]
    assert bool(found["asked"]) == (cache == "copying")


def test_a_window_touches_its_own_items_alone(runner: Any) -> None:
    """Encodings of all other items lie in memory that the device has got back: to read one is an error."""
    few, many = runner.in_stale_memory(2), runner.in_stale_memory(200)
    assert few == many
    assert few["right"]
    with_all = runner.in_stale_memory(2, all_tokens=True)
    assert "illegal memory access" in with_all["error"]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_the_language_model_gets_the_numbers_of_the_host(
    runner: Any, seed: int, async_scheduling: bool
) -> None:
    found = runner.any_order(
        seed,
        async_scheduling=async_scheduling,
        encoder_cache_size=96,  # room for all ten contents
        enable_prefix_caching=bool(seed % 2),
        # however quick this machine encodes, it would be noticed
        options={"itl_target_ms": 0.01, "expert": {"encode_lane_sms": 16} if seed else {}},
    )
    assert found["wrong"] == 0
    assert found["left"] == {f"r{i}": 1 for i in range(15)}
    assert found["loaded"] > 0
    assert found["not_loaded"] == 0
    assert found["on_device"]
    assert found["cached"]


def test_with_a_small_cache_encodings_come_back_from_host_memory(runner: Any) -> None:
    options = {"encoder_cache_host_bytes": 1 << 20}
    found = runner.any_order(5, requests=25, contents=6, encoder_cache_size=24, options=options)
    assert found["wrong"] == 0
    assert set(found["left"].values()) == {1}
    assert found["restored"] > 0
    assert found["cached"]


@pytest.mark.parametrize(
    ("synchronizes", "follows", "is_wrong"),
    [(True, True, False), (False, True, False), (True, False, False), (False, False, True)],
    ids=["as it is", "by the runner's wait alone", "by the lane's wait alone", "with both faults"],
)
@NUM_SMS
def test_the_runner_reads_an_encoding_when_the_lane_has_made_it(
    runner: Any, synchronizes: bool, follows: bool, is_wrong: bool, num_sms: int | None
) -> None:
    """The lane's thread waits before it reports, and the runner's stream before it reads."""
    wrong = runner.lane_before_runner(synchronizes=synchronizes, follows=follows, num_sms=num_sms)
    assert bool(wrong) == is_wrong


@FAULT
@NUM_SMS
def test_the_lane_encodes_after_what_the_runner_had_launched(runner: Any, fault: bool, num_sms: int | None) -> None:
    """The runner's stream changes the encoder's weights just before."""
    assert bool(runner.runner_before_lane(follows=not fault, num_sms=num_sms)) == fault


@FAULT
def test_memory_of_an_encoding_is_free_when_the_runner_s_stream_has_passed(runner: Any, fault: bool) -> None:
    """The encoder cache drops it while a launched merge still has to read it, and the lane's next encode allocates."""
    found = runner.memory_of_an_encoding(records=not fault)
    assert found["held"] == ("inactive" if fault else "active_pending_free")
    assert found["again"] == fault
    assert bool(found["wrong"]) == fault
    if not fault:
        assert found["after"] == "inactive"


@pytest.mark.parametrize("fault", ["", "keep", "restore"], ids=["as it is", "kept beside", "restored beside"])
def test_the_host_tier_copies_in_the_order_of_the_runner_s_stream(runner: Any, fault: str) -> None:
    found = runner.host_tier(fault)
    assert found["restored"] > 0
    assert bool(found["wrong"]) == bool(fault)
    assert fault or found["staged"] == 0


def test_sessions_are_in_the_device_s_memory_what_they_would_be(runner: Any) -> None:
    found = runner.sessions(0, 1000)
    assert found["different"] == []
    assert found["deltas"] >= 15


def test_rows_of_positions_grow_in_memory_that_the_device_reads(runner: Any) -> None:
    assert runner.rows_of_positions(0) == {"wrong": 0, "updated": 30}
