"""The connector of shared encodings: an EC connector whose encoder outputs come from other engines."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request

from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.connectors.between_hosts import BetweenHosts
from vllm_omni_sched.connectors.encodings import EncodingStore
from vllm_omni_sched.connectors.mooncake.options import SharedStoreOptions
from vllm_omni_sched.engine.fitted import engine_options
from vllm_omni_sched.engine.shared.attach import store_options
from vllm_omni_sched.engine.shared.layouts import EncodingLayouts, layout_of
from vllm_omni_sched.engine.shared.messages import SharedOrders, SharedReport
from vllm_omni_sched.engine.shared.planner import SharedPlanner
from vllm_omni_sched.engine.shared.worker import SharedWorker

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json")


class SharedEncodingsConnector(ECConnectorBase):
    """vLLM's EC connector of role ``ec_both`` of one engine; each half delegates everything.

    ``planner`` is the scheduler's half, ``worker`` the workers'; the other one is None.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        config, parallel = engine_options(vllm_config), vllm_config.parallel_config
        store = EncodingStore(
            config.encoder_share_dir,
            space_of(vllm_config),
            max_bytes=config.encoder_share_bytes,
            ttl_seconds=config.encoder_share_ttl_seconds,
        )
        self.planner: SharedPlanner | None = None
        self.worker: SharedWorker | None = None
        if role is ECConnectorRole.SCHEDULER:
            options = store_options(config)
            self.planner = SharedPlanner(
                store,
                vllm_config.scheduler_config.max_num_batched_tokens,
                config.encoder_share_wait_seconds,
                reports_of_all=parallel.tensor_parallel_size == 1 or compat.ec_reports_of_all_workers(),
                clock=monotonic_seconds,
                pause=sleep_seconds,
                between_hosts=None if options is None else _between_hosts(vllm_config, config, options, store),
            )
        else:
            self.worker = SharedWorker(store, writes=parallel.rank % parallel.tensor_parallel_size == 0)
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
        self._plans.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SharedOrders:
        load, step = self._plans.take_orders(scheduler_output.num_scheduled_tokens)
        return SharedOrders(load, self._plans.member, step)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        report = connector_output.ec_connector_worker_meta
        if isinstance(report, SharedReport):
            self._plans.carried_out(report.step, report.offered)

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


def _between_hosts(
    vllm_config: Any, config: OmniSchedConfig, options: SharedStoreOptions, host: EncodingStore
) -> BetweenHosts:
    """Return the way to the Mooncake store, which is connected to in the background.

    Raises:
        ConfigError: the library is not installed, or does not load.
    """
    from vllm_omni_sched.connectors.mooncake.encodings import MooncakeEncodings
    from vllm_omni_sched.connectors.mooncake.store import load_library

    load_library()
    in_folder = Path(vllm_config.model_config.model).is_dir()
    known = options.weights or ("" if in_folder else weights_of(vllm_config))

    @cache
    def space() -> str:
        return space_between_hosts(vllm_config, known or weights_of(vllm_config))

    def connect() -> MooncakeEncodings:
        return MooncakeEncodings(
            options,
            space(),
            ttl_seconds=config.encoder_share_ttl_seconds,
            claim_seconds=config.encoder_share_wait_seconds,
        )

    return BetweenHosts(
        host,
        connect,
        EncodingLayouts(layout_of(vllm_config)),
        answer_seconds=options.answer_seconds,
        wait_seconds=config.encoder_share_wait_seconds,
        clock=monotonic_seconds,
    )


def space_of(vllm_config: Any) -> str:
    """Return the name of the space whose encodings this engine can use, in the store of a host.

    Engines meet in it if their encoders make the same numbers: the same vLLM and model with the same weights, of the
    same type, computed by as many workers in the same way. What else decides an encoding is in its mm_hash.
    """
    model = vllm_config.model_config
    return _space(
        *(*_numbers_of(vllm_config), model.hf_config.to_json_string()),
        *(model.model, model.revision, *_files_of(Path(model.model))),
    )


def space_between_hosts(vllm_config: Any, weights: str) -> str:
    """Return the name of the space whose encodings this engine can use, in a store between hosts.

    As in `space_of`, on devices of one kind. The weights are those of the same name or content, in whichever folder.

    Args:
        vllm_config: of the engine.
        weights: name or hash of the weights.
    """
    model = json.loads(vllm_config.model_config.hf_config.to_json_string())
    model.pop("_name_or_path", None)
    return _space(*_numbers_of(vllm_config), compat.device_name(), json.dumps(model, sort_keys=True), weights)


def weights_of(vllm_config: Any) -> str:
    """Return the hash of the weights of a model in a folder, or the commit of one in a repository.

    Raises:
        ConfigError: neither is known.
    """
    model = vllm_config.model_config
    folder = Path(model.model)
    if folder.is_dir():
        whole = hashlib.blake2b(digest_size=16)
        for path in _weights_in(folder):
            with path.open("rb") as file:
                whole.update(f"{path.name}\0{hashlib.file_digest(file, hashlib.blake2b).hexdigest()}\n".encode())
        return whole.hexdigest()
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(
            f"option 'encoder_share_store.weights' is needed, because the weights of {model.model} cannot be told from "
            "others: give the same name on all hosts that have these weights"
        )
    return f"{model.model}@{commit}"


def _numbers_of(vllm_config: Any) -> tuple[Any, ...]:
    """Return what decides how the encoder computes, beside the model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tower = getattr(getattr(model, "multimodal_config", None), "mm_encoder_tp_mode", None)
    return (
        *(compat.vllm_version(), model.dtype, model.quantization),
        *(parallel.tensor_parallel_size, tower, vllm_config.load_config.load_format),
    )


def _space(*facts: Any) -> str:
    return f"encodings-{hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()}"


def _weights_in(folder: Path) -> list[Path]:
    return sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})


def _files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of the weights of a model in a folder, which may be replaced in place."""
    if not folder.is_dir():
        return []
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _weights_in(folder)]
