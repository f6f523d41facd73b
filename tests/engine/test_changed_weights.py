"""Weights that change in place, then vLLM's calls that reset caches: answers are those of stock vLLM.

A row of the table is a call. Before it, an engine has a picture in its encoder cache, and one that it has evicted. The
encoder's weights change through `collective_rpc`, the call follows, and both pictures and a new one are asked about.
Where vLLM itself keeps an encoding of the former weights, because the call does not reset its encoder cache, so do we.
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
SIDE = [28, 28]
ARGS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 96,  # as many embeddings fit into the encoder cache
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 8},
    "mm_processor_cache_gb": 0,  # a reset of the engine core alone leaves the front end behind
}
CALLS: dict[str, list[list[Any]]] = {
    "none": [],
    "reset_encoder_cache": [["call", "reset_encoder_cache", {}]],
    "reset_mm_cache": [["call", "reset_mm_cache", {}]],
    "reset_prefix_cache": [["call", "reset_prefix_cache", {}]],
    "pause": [
        ["call", "pause_scheduler", {"mode": "abort", "clear_cache": True}],
        ["call", "resume_scheduler", {}],
    ],
    "sleep 0": [["call", "sleep", {"level": 0}], ["call", "wake_up", {"tags": ["scheduling"]}]],
    "sleep 1": [["call", "sleep", {"level": 1}], ["call", "wake_up", {}]],
    "reload_weights": [["call", "collective_rpc", {"method": "reload_weights"}]],
    "reload_weights, reset_encoder_cache": [
        ["call", "collective_rpc", {"method": "reload_weights"}],
        ["call", "reset_encoder_cache", {}],
    ],
    "apply_model, reset_encoder_cache": [["apply", 77], ["call", "reset_encoder_cache", {}]],
}
KEPT = {"lane and host memory": {"profile": "chat", "itl_target_ms": 0.01, "encoder_cache_host_bytes": 1 << 24}}
SHARED = {"encoder_share_bytes": 1 << 26}


def asked(name: str, number: int) -> list[Any]:
    return ["ask", name, "<image> what is it", [[number, *SIDE]], None]


def filled(row: int) -> list[list[Any]]:
    """Fill the encoder cache with other pictures, so that all others leave it."""
    first = 1000 * (row + 1)
    return [
        ["ask", f"{row}-fill-{part}", "<image>" * 8, [[first + 8 * part + n, *SIDE] for n in range(8)], None]
        for part in range(3)
    ]


def script() -> list[list[Any]]:
    actions = []
    for row, (name, calls) in enumerate(CALLS.items()):
        cached, evicted, new = (10 * row + n for n in range(3))
        actions += [asked(f"{name}: evicted, before", evicted), *filled(row), asked(f"{name}: cached, before", cached)]
        actions += [["change", row + 1], *calls]
        actions += [asked(f"{name}: {which}", number) for which, number in (("cached", cached), ("evicted", evicted))]
        actions += [asked(f"{name}: new", new), ["count", name]]
    return actions


APART = [asked("before", 1), ["meet", "changed"], ["meet", "asked"], asked("new", 2), ["count", "end"]]
CHANGES = [
    ["meet", "changed"],
    asked("old", 1),
    ["count", "before"],
    ["change", 1],
    ["call", "reset_encoder_cache", {}],
    asked("old, changed", 1),
    asked("new, changed", 2),
    ["count", "end"],
    ["meet", "asked"],
]
TRUTH = [asked("before", 1), asked("old", 1), asked("new", 2)]
TRUTH += [["change", 1], ["call", "reset_encoder_cache", {}], asked("old, changed", 1), asked("new, changed", 2)]


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("weights")
    stores = {name: folder / f"store-{name}" for name in ("alone", "two")}
    for store in (*stores.values(), folder / "meeting"):
        store.mkdir()
    model = str(write_model("llava", ROOT / ".models" / "llava-4-tokens", image_size=28))
    shared = {name: {**SHARED, "expert": {"encoder_share_dir": str(store)}} for name, store in stores.items()}
    two = {"meet": folder / "meeting", "processes": 2}
    with ExitStack() as stack:
        engines = {
            "stock": Scripted(folder / "stock", model, ARGS, None, script()),
            "truth": Scripted(folder / "truth", model, ARGS, None, TRUTH),
            "kept": Scripted(folder / "kept", model, ARGS, KEPT["lane and host memory"], script()),
            "shared": Scripted(folder / "shared", model, ARGS, shared["alone"], script()),
            "apart": Scripted(folder / "apart", model, ARGS, shared["two"], APART, **two),
            "changes": Scripted(folder / "changes", model, ARGS, shared["two"], CHANGES, **two),
        }
        for engine in engines.values():
            stack.enter_context(engine.process)
        wait_for([*engines.values()])
        return {name: engine.result() for name, engine in engines.items()}


@pytest.mark.parametrize("kind", ["kept", "shared"])
@pytest.mark.parametrize("call", CALLS)
def test_answers_are_those_of_stock(heard: dict[str, Any], kind: str, call: str) -> None:
    expected, got = (
        {name: one for name, one in heard[side]["answers"].items() if name.startswith(f"{call}: ")}
        for side in ("stock", kind)
    )
    assert len(expected) == 5
    assert first_difference(expected, got) is None


@pytest.mark.parametrize("call", CALLS)
def test_answers_show_which_weights_an_encoding_is_of(heard: dict[str, Any], call: str) -> None:
    """Check the other test: former weights would be noticed."""
    answers = heard["stock"]["answers"]
    for which in ("cached", "evicted"):
        same = {"x": answers[f"{call}: {which}"]}
        is_former = first_difference({"x": answers[f"{call}: {which}, before"]}, same) is None
        # stock names items by request where both of its caches are off, so that it encodes each of them anew
        assert not is_former or call.startswith("reload_weights")  # which gives back the weights of the start


def test_the_caches_were_used(heard: dict[str, Any]) -> None:
    kept, shared = heard["kept"]["counts"], heard["shared"]["counts"]
    last = [*CALLS][-1]
    assert kept[last]["encoder_tier_lane"] > len(CALLS)
    assert sum(kept[last]["host_offers"].values()) > len(CALLS)
    assert kept[last]["lane_restarts"] == 0
    assert shared[last]["shared_made"] > 3 * len(CALLS)


def test_an_engine_with_other_weights_is_given_nothing_and_gives_nothing(heard: dict[str, Any]) -> None:
    stock = heard["truth"]["answers"]
    for engine, names in (("changes", ("old", "old, changed", "new, changed")), ("apart", ("before", "new"))):
        answers = heard[engine]["answers"]
        assert first_difference({name: stock[name] for name in names}, {name: answers[name] for name in names}) is None
    assert heard["changes"]["counts"]["before"]["shared_host"] == 1  # of the other engine
    assert heard["changes"]["counts"]["end"]["shared_host"] == 1
    assert heard["apart"]["counts"]["end"]["shared_host"] == 0
