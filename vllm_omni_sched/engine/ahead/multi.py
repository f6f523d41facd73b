"""The encode-ahead connector of an engine whose operator named an EC connector, too: both serve the engine."""

from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request

from vllm_omni_sched import compat
from vllm_omni_sched.engine.ahead.connector import EncodeAheadConnector
from vllm_omni_sched.engine.ahead.messages import AheadOrders, AheadReport, merged
from vllm_omni_sched.engine.fitted import operators_connector


@dataclass
class MultiOrders(AheadOrders):
    """Orders to the workers of both connectors; ``operators`` are those of the operator's."""

    operators: ECConnectorMetadata | None = None


@dataclass
class MultiReport(ECConnectorWorkerMetadata):
    """A worker's reports on both connectors; None where there is nothing to report."""

    lane: AheadReport | None = None
    operators: ECConnectorWorkerMetadata | None = None

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "MultiReport":
        """Merge this report with a later one, or with that of another worker."""
        assert isinstance(other, MultiReport)
        return MultiReport(merged(self.lane, other.lane), merged(self.operators, other.operators))


class EncodeAheadMultiConnector(EncodeAheadConnector):
    """Encode-ahead beside the operator's own connector, which is asked first.

    1. An encoding that the operator's connector has comes from there, and is not encoded in the lane.
    2. While the operator's connector holds a request back, the lane is not asked about that request.
    3. An encoding of the lane, or of host memory, is offered to the operator's connector when it is put into the
       encoder cache, as vLLM offers it those that were encoded in the step.

    ``operators``: the operator's connector, built from its own `ECTransferConfig`.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        config = config_of_operators(vllm_config)
        compat.copy_output_widths(vllm_config.ec_transfer_config, config.ec_transfer_config)
        self.operators: ECConnectorBase = ECConnectorFactory.create_connector(config, role)

    def shutdown(self) -> None:
        try:
            self.operators.shutdown()
        finally:
            super().shutdown()

    # -- the scheduler's half ----------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        return self.operators.has_cache_item(identifier) or super().has_cache_item(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        available = self.operators.ensure_cache_available(request, num_computed_tokens)
        return available and super().ensure_cache_available(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        loads = self.is_consumer and self.operators.has_cache_item(request.mm_features[index].identifier)
        self.operators.update_state_after_alloc(request, index)
        if loads:
            self.planner.host.allocated(request.mm_features[index], request.get_num_encoder_embeds(index))
        else:
            super().update_state_after_alloc(request, index)

    def update_state_after_free(self, request: Request, index: int) -> None:
        self.operators.update_state_after_free(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiOrders:
        orders = super().build_connector_meta(scheduler_output)
        return MultiOrders(**vars(orders), operators=self.operators.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        report = connector_output.ec_connector_worker_meta
        for connector, meta in (
            (self.operators.update_connector_output, getattr(report, "operators", None)),
            (super().update_connector_output, getattr(report, "lane", None)),
        ):
            output = copy(connector_output)
            output.ec_connector_worker_meta = meta
            connector(output)

    def take_unavailable_requests(self) -> set[str]:
        return self.operators.take_unavailable_requests() | super().take_unavailable_requests()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        finished: tuple[bool, dict[str, Any] | None] = self.operators.request_finished(request)
        return finished

    def has_pending_push_work(self) -> bool:
        return self.operators.has_pending_push_work() or super().has_pending_push_work()

    # -- vLLM's own metrics of connectors (0.32 on) ------------------------

    def get_ec_connector_stats(self) -> Any:
        lane = super().get_ec_connector_stats()
        operators = self.operators.get_ec_connector_stats()
        if lane is None and operators is None:
            return None
        from vllm_omni_sched.engine.ahead.multi_stats import MultiStats

        return MultiStats.of(lane, operators, type(self.operators))

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from vllm_omni_sched.engine.ahead.multi_stats import MultiStats

        return MultiStats.of(None, None) if data is None else MultiStats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> Any:
        from vllm_omni_sched.engine.ahead.multi_stats import MultiProm

        config = config_of_operators(vllm_config)
        operators = ECConnectorFactory.get_connector_class(config.ec_transfer_config)
        return MultiProm(
            super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine),
            operators.build_prom_metrics(config, metric_types, labelnames, per_engine),
        )

    # -- the workers' half -------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, MultiOrders)
        assert connector_metadata.operators is not None
        self.operators.bind_connector_metadata(connector_metadata.operators)

    def clear_connector_metadata(self) -> None:
        self.operators.clear_connector_metadata()
        super().clear_connector_metadata()

    def register_caches(self, ec_caches: dict[str, Any]) -> None:
        self.operators.register_caches(ec_caches)

    def start_worker_services(self) -> None:
        self.operators.start_worker_services()

    def start_save_caches(self, **kwargs: Any) -> None:
        self.operators.start_save_caches(**kwargs)

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        self.operators.start_load_caches(encoder_cache, **kwargs)
        super().start_load_caches(encoder_cache, **kwargs)
        if self.is_producer:
            orders = self._get_connector_metadata()
            for mm_hash in (*orders.load.values(), *orders.host.restore):
                self.operators.save_caches(encoder_cache, mm_hash)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        self.operators.save_caches(encoder_cache, mm_hash, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished: tuple[set[str] | None, set[str] | None] = self.operators.get_finished(finished_req_ids)
        return finished

    def build_connector_worker_meta(self) -> Any:
        lane, operators = super().build_connector_worker_meta(), self.operators.build_connector_worker_meta()
        return None if lane is None and operators is None else MultiReport(lane, operators)


def config_of_operators(vllm_config: Any) -> Any:
    """Return a copy of vLLM's configuration with the operator's own `ECTransferConfig` in it."""
    config = copy(vllm_config)
    config.ec_transfer_config = operators_connector(vllm_config.ec_transfer_config)
    return config
