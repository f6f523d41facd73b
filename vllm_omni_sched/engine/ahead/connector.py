"""The encode-ahead connector: an EC connector whose encoder outputs come from a lane on the same device.

vLLM's EC connectors fetch encoder outputs from another instance and hold requests back until they arrive. This one asks
a lane beside the LLM to make them: waiting requests are encoded ahead of their prefill while decode steps go on.
"""

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request

from vllm_omni_sched.engine.ahead.messages import AheadOrders, AheadReport
from vllm_omni_sched.engine.ahead.planner import AheadPlanner
from vllm_omni_sched.engine.ahead.rank import RankWorker
from vllm_omni_sched.engine.ahead.worker import AheadWorker
from vllm_omni_sched.engine.contents import contents_of
from vllm_omni_sched.engine.fitted import ENGINES, engine_options


class EncodeAheadConnector(ECConnectorBase):
    """vLLM's EC connector of role ``ec_both`` of one engine; each half delegates everything.

    ``planner`` is the scheduler's half, ``worker`` the workers'; the other one is None.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        config, parallel = engine_options(vllm_config), vllm_config.parallel_config
        workers = parallel.tensor_parallel_size
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        alone = extra.get(ENGINES, parallel.data_parallel_size) == 1
        self.planner: Any = None
        if role is ECConnectorRole.SCHEDULER:
            self.planner = AheadPlanner(config, contents_of(vllm_config), workers)
        self.worker: Any = None
        if role is ECConnectorRole.WORKER:
            kind = AheadWorker if workers == 1 else RankWorker
            self.worker = kind(config, alone=alone)

    # -- the scheduler's half ----------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        return bool(self.planner.is_ready(identifier))

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return bool(self.planner.may_run(request, num_computed_tokens))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.planner.allocated(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> AheadOrders:
        orders: AheadOrders = self.planner.take_orders(scheduler_output)
        return orders

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        report = connector_output.ec_connector_worker_meta
        if isinstance(report, AheadReport):
            self.planner.take_report(report)

    def take_unavailable_requests(self) -> set[str]:
        failed: set[str] = self.planner.take_failed()
        return failed

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, None  # the core is told when the scheduler has freed it

    def has_pending_push_work(self) -> bool:
        return bool(self.planner.has_orders)

    # -- vLLM's own metrics of connectors (0.32 on) ------------------------

    def get_ec_connector_stats(self) -> Any:
        if self.planner is None or not self.planner.has_news:
            return None
        from vllm_omni_sched.engine.ahead.stats import AheadStats

        return AheadStats.of(*self.planner.take_news())

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from vllm_omni_sched.engine.ahead.stats import AheadStats

        return AheadStats.of([], 0) if data is None else AheadStats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> Any:
        from vllm_omni_sched.engine.ahead.stats import AheadProm

        return AheadProm(vllm_config, metric_types, labelnames, per_engine)

    # -- the workers' half -------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, AheadOrders)
        self.worker.carry_out(orders, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Do nothing: an item encoded in a step is already in the encoder cache of this device."""

    def build_connector_worker_meta(self) -> AheadReport | None:
        report: AheadReport | None = self.worker.report()
        return report

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
