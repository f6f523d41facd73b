"""Clients choose the names of their pictures: nobody gets the encoding of another one because it has the same name.

An engine gets pictures under names that another one has, or had, for other pictures, of equal and of different size.
The reference is what stock vLLM answers to each picture alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from tests.engine.harness.compare import first_difference
from tests.engine.harness.processes import ROOT, wait_for, write_model
from tests.engine.harness.scripted import Scripted
from vllm_omni_sched import compat

pytestmark = [
    pytest.mark.engine,
    pytest.mark.newest,
    pytest.mark.slow,
    pytest.mark.skipif(
        not compat.ec_connectors_hold_back(), reason="connectors of this vLLM cannot hold requests back"
    ),
]
LARGE, SMALL = [56, 56], [56, 28]  # four tokens, two tokens
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = f"{PICTURE} what is it"
ARGS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 96,  # as many embeddings fit into the encoder cache
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 8},
    "mm_processor_cache_gb": 0,  # else vLLM itself takes the first picture of a name for all others
}
HOST = {"profile": "chat", "itl_target_ms": 0.01, "encoder_cache_host_bytes": 1 << 24}


def asked(name: str, number: int, size: list[int], uuid: str | None) -> list[Any]:
    return ["ask", name, PROMPT, [[number, *size]], None if uuid is None else [uuid]]


def filled(at: int) -> list[list[Any]]:
    """Fill the encoder cache with other pictures, so that all others leave it."""
    return [
        ["ask", f"fill-{at}-{part}", PICTURE * 8, [[1000 * at + 10 * part + n, *LARGE] for n in range(8)], None]
        for part in range(4)
    ]


TRUTH = [asked(f"{number}-{size[1]}", number, size, None) for number in range(1, 7) for size in (LARGE, SMALL)]

ONE = [
    asked("1-56", 1, LARGE, "x"),
    asked("3-56", 3, LARGE, "y"),
    # under the name that vLLM gives picture 6, which its client does not have
    ["ask under hash", "5-56", PROMPT, [[5, *LARGE]], [[6, *LARGE]]],
    ["meet", "one has asked"],
    ["meet", "other has asked"],
    ["count", "end"],
]
OTHER = [
    ["meet", "one has asked"],
    asked("2-56", 2, LARGE, "x"),  # another picture of equal size
    asked("4-28", 4, SMALL, "y"),  # of different size
    asked("6-56", 6, LARGE, None),
    ["count", "others"],
    asked("1-56", 1, LARGE, "z"),  # the picture itself, under another name
    asked("3-56", 3, LARGE, None),
    ["count", "end"],
    ["meet", "other has asked"],
]
HOSTED = [
    asked("1-56", 1, LARGE, "x"),
    asked("3-56", 3, LARGE, "y"),
    asked("5-28", 5, SMALL, "z"),
    *filled(1),
    ["count", "filled"],
    asked("2-56", 2, LARGE, "x"),
    asked("4-28", 4, SMALL, "y"),
    asked("6-56", 6, LARGE, "z"),
    ["count", "others"],
    *filled(2),
    ["count", "before"],
    asked("again", 2, LARGE, "x"),
    ["count", "end"],
]


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("names")
    store, meeting = folder / "store", folder / "meeting"
    store.mkdir()
    meeting.mkdir()
    model = str(write_model("qwen2-vl", ROOT / ".models" / "qwen2-vl"))
    share = {"encoder_share_bytes": 1 << 26, "expert": {"encoder_share_dir": str(store)}}
    with ExitStack() as stack:
        engines = {
            "stock": Scripted(folder / "stock", model, ARGS, None, TRUTH),
            "host": Scripted(folder / "host", model, ARGS, HOST, HOSTED),
            "one": Scripted(folder / "one", model, ARGS, share, ONE, meet=meeting, processes=2),
            "other": Scripted(folder / "other", model, ARGS, share, OTHER, meet=meeting, processes=2),
        }
        for engine in engines.values():
            stack.enter_context(engine.process)
        wait_for([*engines.values()])
        return {name: engine.result() for name, engine in engines.items()}


def true_of(heard: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: heard["stock"]["answers"][name] for name in names}


def test_pictures_differ_so_that_a_wrong_one_would_be_noticed(heard: dict[str, Any]) -> None:
    answers = {name: one["logprobs"] for name, one in heard["stock"]["answers"].items()}
    assert len({str([round(value, 3) for value in logprobs]) for logprobs in answers.values()}) == len(answers)


@pytest.mark.parametrize("name", ["2-56", "4-28", "6-56", "1-56", "3-56"])
def test_an_engine_gets_no_encoding_of_another_engine_by_its_name(heard: dict[str, Any], name: str) -> None:
    got = {name: heard["other"]["answers"][name]}
    assert first_difference(true_of(heard, name), got) is None


def test_pictures_are_shared_by_their_content_whatever_their_names(heard: dict[str, Any]) -> None:
    counts = heard["other"]["counts"]
    assert (counts["others"]["shared_made"], counts["others"]["shared_host"]) == (3, 0)
    assert (counts["end"]["shared_made"], counts["end"]["shared_host"]) == (3, 2)
    assert heard["one"]["counts"]["end"]["shared_made"] == 3


@pytest.mark.parametrize("name", ["1-56", "3-56", "5-28", "2-56", "4-28", "6-56"])
def test_host_memory_and_the_lane_give_no_encoding_by_its_name(heard: dict[str, Any], name: str) -> None:
    assert first_difference(true_of(heard, name), {name: heard["host"]["answers"][name]}) is None


def test_host_memory_gives_back_the_encoding_of_the_same_picture(heard: dict[str, Any]) -> None:
    counts = heard["host"]["counts"]
    assert counts["filled"]["host_offers"]["restore_is_quicker"] >= 3
    assert counts["others"]["encoder_tier_host"] == 0
    assert counts["others"]["kept_not_reused"]["other_content"] == 3
    assert counts["end"]["encoder_tier_host"] == counts["before"]["encoder_tier_host"] + 1
    again = {"2-56": heard["host"]["answers"]["again"]}
    assert first_difference(true_of(heard, "2-56"), again) is None
