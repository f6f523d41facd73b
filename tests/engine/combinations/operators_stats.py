"""Statistics of `Operators`, which vLLM collects from 0.32 on."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats


class OperatorsStats(ECConnectorStats):
    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: ECConnectorStats) -> OperatorsStats:
        return OperatorsStats(data={"stored": self.data["stored"] + other.data["stored"]})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


class KeepsCount:
    """Stands for the metrics of `Operators` on the page."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self.seen.append(transfer_stats_data)
