"""Worker half of the host tier: holds encodings in host memory. Depends on torch, not on vLLM."""

from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import EncodingLostError
from vllm_omni_sched.engine.ahead.host_messages import HostOrders, HostReport


@dataclass(frozen=True)
class _Kept:
    tensor: torch.Tensor  # in host memory
    device: torch.device  # where it belongs


class HostStore:
    """Keeps encodings in host memory as ordered, up to a bound of its own.

    1. An encoding on the CPU is kept without a copy, unless it is a view of larger memory that it would keep alive.
       Other encodings are copied to pinned memory on the stream of the step: the step frees the tensor after that
       copy, and restores come after it, too, so that no thread waits.
    2. An encoding that is not in the encoder cache, or would exceed ``max_bytes``, is reported as lost.

    Args:
        max_bytes: bound on the memory of tensors held here, in bytes.
        clock: seconds, for copies that end before the call returns; others are timed by the device.
    """

    def __init__(self, max_bytes: int, clock: Clock = monotonic_seconds) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._report = HostReport()
        self._under_way: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, mm_hash: object) -> bool:
        return mm_hash in self._kept

    def before_frees(self, orders: HostOrders, encoder_cache: MutableMapping[str, torch.Tensor]) -> None:
        """Carry out drop and keep, while ``encoder_cache`` still holds the encodings that this step frees.

        Args:
            orders: of the step.
            encoder_cache: mm_hash -> tensor of shape (num_encoder_embeds, hidden_size).
        """
        for mm_hash in orders.drop:
            gone = self._kept.pop(mm_hash, None)  # None if it was reported as lost while this order was on its way
            if gone is not None:
                self.num_bytes -= gone.tensor.nbytes
        for mm_hash, ticket in orders.keep:
            tensor = encoder_cache.get(mm_hash)
            if tensor is None or self.num_bytes + tensor.nbytes > self.max_bytes:
                self._report.lost[ticket] = mm_hash
                continue
            self._kept[mm_hash] = _Kept(to_host(tensor), tensor.device)
            self.num_bytes += tensor.nbytes
            self._report.kept[ticket] = mm_hash, tensor.nbytes
            self._report.embeds += tensor.shape[0]

    def restore(self, orders: HostOrders, encoder_cache: MutableMapping[str, torch.Tensor]) -> None:
        """Put encodings back into ``encoder_cache``.

        Raises:
            EncodingLostError: one is missing. The scheduler restores only encodings that were reported as kept, and
                tokens would be computed without it, so the engine must not go on.
        """
        for mm_hash in orders.restore:
            kept = self._kept.get(mm_hash)
            if kept is None:
                raise EncodingLostError(
                    f"encoding {mm_hash} cannot be restored: this worker does not hold it in host memory"
                )
            encoder_cache[mm_hash] = self._timed_copy(kept)

    def _timed_copy(self, kept: _Kept) -> torch.Tensor:
        num_bytes = kept.tensor.nbytes
        if kept.device.type != "cuda":
            started = self._clock()
            tensor = kept.tensor.to(kept.device)
            self._report.restored_bytes += num_bytes
            self._report.restored_seconds += self._clock() - started
            return tensor
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        tensor = kept.tensor.to(kept.device, non_blocking=True)
        end.record()
        self._under_way.append((num_bytes, start, end))
        return tensor

    def forget(self) -> None:
        """Drop all encodings."""
        self._kept, self.num_bytes, self._report = {}, 0, HostReport()
        self._under_way.clear()

    def take_report(self) -> HostReport:
        """Return the results since the last call."""
        while self._under_way and self._under_way[0][2].query():
            num_bytes, start, end = self._under_way.popleft()
            self._report.restored_bytes += num_bytes
            self._report.restored_seconds += start.elapsed_time(end) / 1000
        report, self._report = self._report, HostReport()
        return report


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory; from a GPU it is copied on the current stream, and is complete after that.

    A tensor on the CPU is returned as it is, or copied if it is a view of larger memory.
    """
    if tensor.device.type == "cpu":
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        return tensor.clone() if is_part else tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=tensor.device.type == "cuda")
