"""Release of the raw data of items that a session has committed; it can be read back from a spill file."""

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.engine import tensor_pickle
from vllm_omni_sched.items import FeatureList, SpillFile
from vllm_omni_sched.items.feature_list import Strip
from vllm_omni_sched.logs import logger_name
from vllm_omni_sched.monitor.counts import SchedulerMetrics

logger = init_logger(logger_name(__name__))


class CommittedRelease:
    """Spills the items that a session's frontier has passed, a batch at a time.

    If a file cannot be written, one warning is logged, and data stays in memory from then on.
    """

    def __init__(self, config: OmniSchedConfig, strip: Strip, metrics: SchedulerMetrics) -> None:
        self._config = config
        self._strip = strip
        self._metrics = metrics
        self._broken = False

    def after(self, output: SchedulerOutput, requests: Mapping[str, Any]) -> None:
        """Release committed items of the sessions that this step's messages are about."""
        for new in output.scheduled_new_reqs:
            if self._broken:
                return
            request = requests[new.req_id]
            if request.resumable and isinstance(request.mm_features, FeatureList):
                self._release(request.mm_features)

    def _release(self, features: FeatureList) -> None:
        config = self._config
        if features.frontier - features.num_released < config.release_batch_items:
            return
        spill = features.spill or SpillFile(config.spill_dir, config.spill_max_bytes, tensor_pickle.dumps)
        before = spill.size_bytes
        try:
            released = features.release_committed(config.release_batch_items, spill, self._strip)
        except OSError as error:
            self._broken = True
            logger.warning(
                "The spill file of a session cannot be written; items of all sessions stay in memory from now on: %s",
                error,
            )
            return
        self._metrics.spilled_items += released
        self._metrics.spilled_bytes += spill.size_bytes - before
