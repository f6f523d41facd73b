"""Encode-ahead beside the connectors that vLLM 0.33 brings: host memory (`ECCPUConnector`) and `cross_encoder_cache`.

`ECCPUConnector` is vLLM's own: its cache, its memory of the host, and the orders to its worker. Only its copies between
the device and the host are made by this test, because vLLM makes them with operations of CUDA alone.
"""

from __future__ import annotations

from importlib import import_module
from random import Random
from typing import Any

import pytest
import torch
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from tests.engine.harness.ahead_v2 import EMBEDS, HIDDEN, Engine
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.engine.ahead.multi import EncodeAheadMultiConnector
from vllm_omni_sched.engine.fitted import fitted_options, operators_connector
from vllm_omni_sched.engine.shared.attach import attach_shared_encodings
from vllm_omni_sched.engine.start import attach_encode_ahead
from vllm_omni_sched.testing.config import make_vllm_config

pytestmark = pytest.mark.newest

ITEM_BYTES = EMBEDS * HIDDEN * 4
CONTENTS = 10


def offloading(role: str = "ec_both", items: int = 2 * CONTENTS) -> ECTransferConfig:
    return ECTransferConfig(
        ec_connector="ECCPUConnector", ec_role=role, ec_connector_extra_config={"ec_cpu_bytes": items * ITEM_BYTES}
    )


def reusing() -> ECTransferConfig:
    return ECTransferConfig(
        ec_connector="ECMooncakeConnector",
        ec_role="ec_producer",
        ec_connector_extra_config={"cross_encoder_cache": True},
    )


class HostCopies:
    """Copies what the scheduler's half of `ECCPUConnector` orders, at once."""

    def __init__(self, vllm_config: Any) -> None:
        self._region = import_module(f"{CPU}.common").create_ec_shared_region(vllm_config)
        self._metadata = import_module(f"{CPU}.common").ECCPUWorkerMetadata()
        self.saved: list[str] = []
        self.loaded: list[str] = []

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], connector_metadata: Any) -> None:
        for mm_hash, (transfer_id, block_ids, shape) in connector_metadata.loads.items():
            flat = self._region.blocks[block_ids].view(torch.float32).reshape(-1)
            encoder_cache[mm_hash] = flat[: shape[0] * shape[1]].reshape(shape).clone()
            self._metadata.completed_loads.append(transfer_id)
            self.loaded.append(mm_hash)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, connector_metadata: Any) -> None:
        block_ids = connector_metadata.saves.get(mm_hash)
        if block_ids is not None:
            blocks = encoder_cache[mm_hash].contiguous().view(torch.int8).reshape(len(block_ids), -1)
            self._region.blocks[block_ids] = blocks
            self._metadata.completed_saves.append(mm_hash)
            self.saved.append(mm_hash)

    def flush_saves(self) -> None:
        """Do nothing: each copy has been made."""

    def build_connector_worker_meta(self) -> Any:
        found, self._metadata = self._metadata, type(self._metadata)()
        return found if found.completed_saves or found.completed_loads else None

    def shutdown(self) -> None:
        self._region.cleanup()


CPU = "vllm.distributed.ec_transfer.ec_connector.cpu"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)  # which no engine on a CPU has
    connector = import_module(f"{CPU}.connector").ECCPUConnector
    monkeypatch.setattr(connector, "_make_worker", lambda self, vllm_config: HostCopies(vllm_config))


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_either_has_encoded_comes_from_memory_of_the_host_and_only_the_rest_from_the_lane(
    seed: int, async_scheduling: bool
) -> None:
    """The gather of each step compares every embedding with the one that the model would make."""
    with Engine(
        ec_transfer_config=offloading(),
        async_scheduling=async_scheduling,
        encoder_cache_size=3 * EMBEDS,
        num_blocks=40,
        options={"itl_target_ms": 0.01},
    ) as engine:
        measured = operators_connector(engine.scheduler.vllm_config.ec_transfer_config)
        measured.mm_encoder_output_widths = {"image": HIDDEN}  # as vLLM does before the scheduler is made
        engine.run(Random(seed), 25, values=range(CONTENTS))
        assert {len(reasons) for reasons in engine.left.values()} == {1}
        planner = engine.scheduler.omni.policies.planner
        operators = engine.connector.operators.connector_worker
        assert operators.loaded
        assert planner.decisions.taken_from_lane
        # Whatever was encoded, by the lane or in the step, was offered once and kept.
        assert len(operators.saved) == len(set(operators.saved)) <= CONTENTS
        for _ in range(5):  # reports of the last copies
            engine.step()
        assert not engine.scheduler.ec_connector.has_pending_push_work()


def test_model_runner_v1_is_refused_by_vllm_itself() -> None:
    made = make_vllm_config(options={"encode_ahead": True}, ec_transfer_config=offloading())
    assert made.ec_transfer_config.ec_connector == "EncodeAheadMultiConnector"
    with pytest.raises(ValueError, match="ECCPUConnector requires the V2 model runner"):
        EncodeAheadMultiConnector(made, ECConnectorRole.SCHEDULER)


@pytest.mark.parametrize("named", [offloading(), reusing()])
def test_encodings_that_engines_of_a_host_share_have_one_store(named: ECTransferConfig) -> None:
    made = make_vllm_config(options={"encoder_share_bytes": 1 << 20}, ec_transfer_config=named)
    with pytest.raises(
        ConfigError, match=f"--ec-transfer-config names {named.ec_connector}, and encodings have one store: leave it"
    ):
        attach_shared_encodings(made)


def test_an_encoder_that_reuses_what_others_have_made_is_served_under_a_profile_and_not_under_the_option() -> None:
    made = make_vllm_config(options={"profile": "chat"}, ec_transfer_config=reusing())
    assert made.ec_transfer_config == reusing_with(made.ec_transfer_config.engine_id)
    (withheld,) = fitted_options(made).withheld
    assert str(withheld).startswith("encode_ahead stays off, because this engine only encodes (ec_role 'ec_producer')")
    with pytest.raises(ConfigError, match="this engine only encodes"):
        attach_encode_ahead(made)


def reusing_with(engine_id: str | None) -> ECTransferConfig:
    made = reusing()
    made.engine_id = engine_id
    return made
