"""Release of the raw data of items that a session has committed; it can be read back from a spill file."""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_sched.config.options import OmniSchedConfig
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
        spill = features.spill or SpillFile(config.spill_dir, config.spill_max_bytes, pickled)
        before = spill.size_bytes
        try:
            released = features.release_committed(config.release_batch_items, spill, self._strip)
        except OSError as error:
            self._broken = True
            logger.warning(
                "The spill file of a session cannot be written, so the items of all sessions stay in memory from now "
                "on; free space in the folder of option 'spill_dir' and restart to spill again: %s",
                error,
            )
            return
        self._metrics.spilled_items += released
        self._metrics.spilled_bytes += spill.size_bytes - before


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) is torch.Tensor
            and obj.device.type == "cpu"
            and obj.layout is torch.strided
            and not obj.requires_grad
        ):
            raw = obj.detach().contiguous().reshape(-1).view(torch.uint8)
            # bytearray, because a tensor over read-only bytes would not be writable.
            return _tensor, (bytearray(raw.numpy()), obj.dtype, tuple(obj.shape))
        return NotImplemented


def pickled(items: Any) -> bytes:
    """Return ``items`` as bytes for `pickle.loads` in this process, with tensors as raw bytes.

    torch's own pickling is ten times slower for small tensors.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(items)
    return buffer.getvalue()
