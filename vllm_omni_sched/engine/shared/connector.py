"""The connector of shared encodings: an EC connector whose encoder outputs come from other engines."""

import hashlib
from pathlib import Path
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request

from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.connectors.encodings import EncodingStore
from vllm_omni_sched.engine.contents import contents_of
from vllm_omni_sched.engine.fitted import engine_options
from vllm_omni_sched.engine.shared.layouts import EncodingLayouts, expected_layouts
from vllm_omni_sched.engine.shared.messages import SharedOrders, SharedReport
from vllm_omni_sched.engine.shared.planner import SharedPlanner
from vllm_omni_sched.engine.shared.worker import SharedWorker

_ENCODES = (
    *("mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
    *("video_pruning_rate", "video_pruning_method"),
)
"""Options of vLLM's multimodal configuration that change what an encoder makes of the same data."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json")

TTL_SECONDS = 3600.0
"""Shared encodings that nobody has used for so long are removed."""


class SharedEncodingsConnector(ECConnectorBase):
    """vLLM's EC connector of role ``ec_both`` of one engine; each half delegates everything.

    ``planner`` is the scheduler's half, ``worker`` the workers'; the other one is None.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        config, parallel = engine_options(vllm_config), vllm_config.parallel_config

        def open_store(space: str) -> EncodingStore:
            return EncodingStore(
                config.encoder_share_dir,
                space,
                max_bytes=config.encoder_share_bytes,
                ttl_seconds=TTL_SECONDS,
            )

        model = vllm_config.model_config
        space = space_of(vllm_config, model.model, model.revision, *_files_of(Path(model.model)))
        self.planner: SharedPlanner | None = None
        self.worker: SharedWorker | None = None
        if role is ECConnectorRole.SCHEDULER:
            self.planner = SharedPlanner(
                open_store,
                space,
                contents_of(vllm_config),
                EncodingLayouts(expected_layouts(vllm_config)),
                vllm_config.scheduler_config.max_num_batched_tokens,
                config.encoder_share_wait_seconds,
                reports_of_all=parallel.tensor_parallel_size == 1 or compat.ec_reports_of_all_workers(),
                clock=monotonic_seconds,
                pause=sleep_seconds,
            )
        else:
            self.worker = SharedWorker(
                open_store,
                space,
                lambda weights: space_of(vllm_config, weights),
                writes=parallel.rank % parallel.tensor_parallel_size == 0,
            )
        self._device = vllm_config.device_config.device_type

    # -- the scheduler's half ----------------------------------------------

    @property
    def _plans(self) -> SharedPlanner:
        assert self.planner is not None
        return self.planner

    def has_cache_item(self, identifier: str) -> bool:
        return self._plans.has(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._plans.may_run(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._plans.allocated(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SharedOrders:
        return self._plans.take_orders(scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        report = connector_output.ec_connector_worker_meta
        if isinstance(report, SharedReport):
            self._plans.carried_out(report)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._plans.finished(request)
        return False, None

    # -- the workers' half -------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, SharedOrders)
        assert self.worker is not None
        self.worker.carry_out(orders, encoder_cache, self._device)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        assert self.worker is not None
        self.worker.offer(mm_hash, encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> SharedReport | None:
        assert self.worker is not None
        return self.worker.report()

    def shutdown(self) -> None:
        for half in (self.planner, self.worker):
            if half is not None:
                half.close()


def space_of(vllm_config: Any, *weights: Any) -> str:
    """Return the name of the space whose encodings this engine can use, in the store of a host.

    Engines meet in it if their encoders make the same numbers: the same vLLM and model with the same weights, of the
    same type, computed by as many workers in the same way. What else decides an encoding is in the digest of its item.

    Args:
        vllm_config: of the engine.
        weights: what tells them from others: where they were loaded from, or their digest.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    multimodal = getattr(model, "multimodal_config", None)
    facts = (
        *(compat.vllm_version(), model.dtype, model.quantization, model.hf_config.to_json_string()),
        *(parallel.tensor_parallel_size, vllm_config.load_config.load_format, weights),
        *(str(getattr(multimodal, name, None)) for name in _ENCODES),
    )
    return f"encodings-{hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()}"


def _files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of the weights of a model in a folder, which may be replaced in place."""
    if not folder.is_dir():
        return []
    files = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
