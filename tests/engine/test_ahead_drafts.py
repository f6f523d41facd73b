"""Encode-ahead with a drafter that reads behind the chunk, and with items that are left to the step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.harness import bench as harness
from tests.engine.harness.bench import EMBEDS, Bench
from tests.support.drafting import Drafting
from vllm_omni_sched import OmniScheduler, OmniSyncScheduler, compat
from vllm_omni_sched.config.errors import ConfigError, NoLaneError
from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.engine.ahead import encode as ahead_encode
from vllm_omni_sched.engine.ahead import worker as ahead_worker
from vllm_omni_sched.engine.ahead.messages import NO_LANE
from vllm_omni_sched.engine.ahead.worker import AheadWorker
from vllm_omni_sched.engine.start import attach_encode_ahead
from vllm_omni_sched.lanes import InlineLane
from vllm_omni_sched.testing.config import make_vllm_config

pytestmark = pytest.mark.skipif(
    not compat.ec_connectors_hold_back(), reason="connectors of this vLLM cannot hold requests back"
)


class DraftingScheduler(Drafting, OmniScheduler):
    pass


class DraftingSyncScheduler(Drafting, OmniSyncScheduler):
    pass


class DataBench(Bench):
    """A bench whose worker keeps the data of items, as it was sent."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.sent: dict[str, list[Any]] = {}

    def _as_worker(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            self.sent[new.req_id] = new.mm_features
        for request_id, ids in scheduled.scheduled_encoder_inputs.items():
            loaded = (*scheduled.ec_connector_metadata.load, *scheduled.ec_connector_metadata.host.restore)
            for feature in (self.sent[request_id][i] for i in ids):
                assert feature.data is not None or feature.identifier in loaded, "no data to encode"
        super()._as_worker(scheduled)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "OmniScheduler", DraftingScheduler)
    monkeypatch.setattr(harness, "OmniSyncScheduler", DraftingSyncScheduler)


@pytest.mark.usefixtures("drafting")
def test_a_piece_ends_one_token_before_a_missing_item() -> None:
    bench = DataBench(max_num_batched_tokens=256)
    bench.decode()
    bench.add("r", 200, [(4, "a"), (100, "b")])
    bench.step(finish=1)
    assert bench.step().num_scheduled_tokens == {"text": 1, "r": 99}
    bench.step(finish=1)
    assert bench.step().num_scheduled_tokens == {"text": 1, "r": 101}
    assert (bench.in_step, bench.submitted) == ([], ["a", "b"])


@pytest.mark.usefixtures("drafting")
def test_an_item_right_behind_a_chunk_goes_to_the_lane_with_those_in_it() -> None:
    """A chunk has 63 tokens beside one that decodes: the drafter reads the item while that chunk runs."""
    bench = DataBench()
    bench.decode()
    bench.add("r", 90, [(4, "a"), (63, "b")])
    bench.step(finish=0)
    assert bench.at_lane == ["a", "b"]
    bench.step(finish=2)
    for _ in range(4):
        bench.step()
    assert (bench.in_step, bench.cache) == ([], {"a", "b"})


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("disable_chunked_mm_input", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", [5, 11, 12, 13, 19, 26])
def test_whatever_comes_no_item_is_missing_and_none_is_without_data(
    request: pytest.FixtureRequest, seed: int, drafts: bool, async_scheduling: bool, disable_chunked_mm_input: bool
) -> None:
    """In these seeds items are evicted while their requests are scheduled."""
    if drafts:
        request.getfixturevalue("drafting")
    chance = random.Random(seed)
    bench = DataBench(
        async_scheduling=async_scheduling,
        encoder_cache_size=chance.choice([EMBEDS, 24, 64]),
        num_blocks=chance.choice([12, 40, 400]),
        max_num_batched_tokens=chance.choice([16, 64, 300]),
        enable_prefix_caching=chance.random() < 0.5,
        disable_chunked_mm_input=disable_chunked_mm_input,
        max_num_seqs=chance.choice([2, 16]),
    )
    bench.churn(chance, 25, lambda: chance.randrange(12))
    assert len(bench.planner.decisions.ledger) == 0
    assert {reason for reasons in bench.left.values() for reason in reasons} <= {"length", "stop"}


def engine(**compilation: Any) -> Any:
    """What is read of the configuration of an engine on CUDA."""
    made = make_vllm_config()
    made.device_config = SimpleNamespace(device_type="cuda")
    made.compilation_config = SimpleNamespace(compile_mm_encoder=False, **compilation)
    return made


def test_graphs_of_sizes_that_nobody_named_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="name them in encoder_cudagraph_token_budgets, or set it to false"):
        attach_encode_ahead(engine(cudagraph_mm_encoder=True))


def test_what_is_left_to_graphs_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni_sched.engine import start

    said: list[str] = []
    monkeypatch.setattr(start.logger, "info", lambda text, *args: said.append(text % args))
    attach_encode_ahead(engine(cudagraph_mm_encoder=True, encoder_cudagraph_token_budgets=[256]))
    assert said == [
        "Encode-ahead leaves items of up to 256 embeddings to the step, which encodes them by a CUDA graph."
    ]


class Tower(torch.nn.Module):
    """A model with an encoder and a language model; either has a layer to which LoRA weights may be added."""

    def __init__(self, *, in_encoder: bool) -> None:
        super().__init__()
        lora_layer = compat.find("vllm.lora.layers", "BaseLayerWithLoRA")
        adapted, plain = lora_layer(), torch.nn.Identity()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(adapted if in_encoder else plain)])
        self.language = torch.nn.ModuleList([plain if in_encoder else adapted])

    def get_language_model(self) -> torch.nn.Module:
        return self.language


def test_an_encoder_whose_layers_take_lora_weights_is_refused_to_an_operator_and_left_out_of_a_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead_encode.refuse_lora_layers(Tower(in_encoder=False))
    told = AheadWorker(load_config({"omni_sched": {"encode_ahead": True}}))
    with pytest.raises(NoLaneError, match="Tower does not tell vLLM which of its layers belong to the language model"):
        told.start(Tower(in_encoder=True), torch.device("cpu"))
    said: list[str] = []
    monkeypatch.setattr(ahead_worker.logger, "warning", lambda text, *args: said.append(text % args))
    worker = AheadWorker(load_config({"omni_sched": "chat"}))
    worker.start(Tower(in_encoder=True), torch.device("cpu"))
    assert isinstance(worker.lane, InlineLane)
    report = worker.report()
    assert report is not None
    assert report.lane == NO_LANE
    (why,) = said
    assert why.startswith("Profile chat has turned on 'encode_ahead', which this engine cannot have: all items are ")
    assert "name layers of the language model alone in --lora-target-modules" in why
