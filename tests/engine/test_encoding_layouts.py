"""Bytes that anybody may have put into the store between hosts reach a worker only if they are the item's encoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from vllm_omni_sched.connectors.between_hosts import BetweenHosts, SharedItem, StoreCounts
from vllm_omni_sched.connectors.encodings import EncodingStore
from vllm_omni_sched.engine.shared.layouts import EncodingLayouts, Layout, layout_of
from vllm_omni_sched.engine.shared.messages import SharedOrders
from vllm_omni_sched.engine.shared.planner import SharedPlanner
from vllm_omni_sched.engine.shared.worker import SharedWorker

EMBEDS, HIDDEN = 4, 8
ITEM = SharedItem("image", EMBEDS)
MODEL = Layout(HIDDEN, "BF16")


def encoding(*shape: int, dtype: torch.dtype = torch.bfloat16, name: str = "encoding") -> bytes:
    return save({name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)})


GOOD = encoding(EMBEDS, HIDDEN)
BAD = {
    "it is not in the format of safetensors": b"no safetensors at all",
    "header too small": b"",
    "header too large": (1 << 60).to_bytes(8, "little") + b"{}",
    "file not fully covered": GOOD[:-1],
    "it has the tensors ['other']": encoding(EMBEDS, HIDDEN, name="other"),
    "it has the tensors []": (2).to_bytes(8, "little") + b"{}",
    "it has 5 embeddings, and the item has 4": encoding(EMBEDS + 1, HIDDEN),
    "it has 0 embeddings": encoding(0, HIDDEN),
    "it has 1 dimensions": encoding(EMBEDS * HIDDEN),
    "its hidden size is 9 and its dtype BF16, in place of 8 and BF16": encoding(EMBEDS, HIDDEN + 1),
    "its hidden size is 8 and its dtype F32": encoding(EMBEDS, HIDDEN, dtype=torch.float32),
    "its hidden size is 8 and its dtype I64": encoding(EMBEDS, HIDDEN, dtype=torch.int64),
}


class Engine:
    """The planner of an engine, its worker, and a store between hosts, without threads between the stores."""

    def __init__(self, folder: Path) -> None:
        for name in ("host", "far"):
            folder.joinpath(name).mkdir()
        bounds: Any = {"max_bytes": 1 << 20, "ttl_seconds": 60.0}
        self.store = EncodingStore(str(folder / "host"), "space", **bounds)
        self.far = EncodingStore(str(folder / "far"), "far", **bounds)
        self.way = BetweenHosts(
            self.store,
            lambda: self.far,
            EncodingLayouts(MODEL),
            answer_seconds=1.0,
            wait_seconds=1.0,
            clock=lambda: 0.0,
            threaded=False,
        )
        self.way.work()
        self.planner = SharedPlanner(
            self.store,
            64,
            1.0,
            reports_of_all=True,
            clock=lambda: 0.0,
            pause=lambda seconds: None,
            between_hosts=self.way,
        )
        self.worker = SharedWorker(EncodingStore(str(folder / "host"), "space", **bounds), writes=False)

    def close(self) -> None:
        self.worker.close()
        self.planner.close()

    def step(self, key: str) -> dict[str, torch.Tensor]:
        """Run a request with that item, and return the encoder cache of the worker after its first step."""
        place = SimpleNamespace(offset=0, length=EMBEDS)
        feature = SimpleNamespace(identifier=key, modality="image", mm_position=place)
        request: Any = SimpleNamespace(
            request_id="r", mm_features=[feature], num_computed_tokens=0, get_num_encoder_embeds=lambda _: EMBEDS
        )
        assert not self.planner.may_run(request, 0)
        self.way.work()
        assert self.planner.may_run(request, 0)
        self.planner.has(key)
        self.planner.allocated(key)
        load, step = self.planner.take_orders({"r": EMBEDS})
        cache: dict[str, torch.Tensor] = {}
        self.worker.carry_out(SharedOrders(load, self.planner.member, step), cache, "cpu")
        return cache


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with closing(Engine(tmp_path)) as made:
        yield made


def test_an_encoding_of_the_item_is_loaded(engine: Engine) -> None:
    engine.far.put("a", GOOD)
    cache = engine.step("a")
    assert cache["a"].shape == (EMBEDS, HIDDEN)
    assert torch.equal(cache["a"].flatten(), torch.arange(EMBEDS * HIDDEN).to(torch.bfloat16))
    assert (engine.planner.counts.brought, engine.planner.counts.made) == (1, 0)


@pytest.mark.parametrize("why", BAD)
def test_other_bytes_are_a_miss_and_the_engine_makes_the_item(engine: Engine, why: str) -> None:
    engine.far.put("a", BAD[why])
    assert engine.step("a") == {}
    assert (engine.planner.counts.brought, engine.planner.counts.made) == (0, 1)
    assert engine.way.counts == StoreCounts(malformed=1)
    refused = EncodingLayouts(MODEL).why_refused(BAD[why], ITEM)
    assert refused is not None
    assert why in refused


def test_what_the_engine_has_made_itself_tells_more_than_the_configuration() -> None:
    layouts = EncodingLayouts(MODEL)
    layouts.learn(encoding(1, 3 * HIDDEN, dtype=torch.float32), ITEM)
    assert layouts.why_refused(encoding(EMBEDS, 3 * HIDDEN, dtype=torch.float32), ITEM) is None
    assert layouts.why_refused(GOOD, ITEM) is not None
    assert layouts.why_refused(GOOD, SharedItem("video", EMBEDS)) is None  # of another modality, nothing was made


def test_without_a_layout_in_the_configuration_nothing_is_known_until_something_was_made() -> None:
    layouts = EncodingLayouts(None)
    assert not layouts.can_tell(ITEM)
    layouts.learn(b"what a model of another kind may make", ITEM)
    assert not layouts.can_tell(ITEM)
    layouts.learn(GOOD, ITEM)
    assert layouts.can_tell(ITEM)
    assert not layouts.can_tell(SharedItem("audio", 1))
    assert layouts.why_refused(GOOD, ITEM) is None


@pytest.mark.parametrize(
    ("config", "dtype", "pruning", "layout"),
    [
        ("{}", torch.float16, None, Layout(HIDDEN, "F16")),
        ("{}", torch.bfloat16, 0.0, MODEL),
        ("{}", torch.float64, None, None),
        ("{}", torch.bfloat16, 0.5, None),
        ('{"vision_config": {"deepstack_visual_indexes": [8]}}', torch.bfloat16, None, None),
    ],
)
def test_the_configuration_tells_the_layout_of_models_that_append_nothing(
    config: str, dtype: torch.dtype, pruning: float | None, layout: Layout | None
) -> None:
    model = SimpleNamespace(
        dtype=dtype,
        multimodal_config=SimpleNamespace(video_pruning_rate=pruning),
        hf_config=SimpleNamespace(to_json_string=lambda: config),
        get_inputs_embeds_size=lambda: HIDDEN,
    )
    assert layout_of(SimpleNamespace(model_config=model)) == layout
