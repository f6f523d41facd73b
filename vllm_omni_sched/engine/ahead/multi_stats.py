"""Statistics of encode-ahead and of the operator's own connector, for vLLM's EC connector metrics (vLLM 0.32 on)."""

from importlib import import_module
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from vllm_omni_sched.engine.ahead.messages import merged
from vllm_omni_sched.engine.ahead.stats import AheadProm, AheadStats

_LANE, _OPERATORS, _CLASS = "encode_ahead", "operators", "operators_class"


class MultiStats(ECConnectorStats):
    """Statistics of both connectors since the last report, each as its own class keeps them.

    The data is a plain dictionary, because it travels to the front end: the data of both, None where there is none,
    and the path of the operator's class, which alone can read its own.
    """

    @classmethod
    def of(
        cls, lane: AheadStats | None, operators: ECConnectorStats | None, operators_class: type | None = None
    ) -> "MultiStats":
        """Return the statistics of both; ``operators_class`` is that of the operator's connector."""
        path = None if operators_class is None else f"{operators_class.__module__}:{operators_class.__qualname__}"
        return cls._with(lane, operators, path)

    @classmethod
    def _with(cls, lane: Any, operators: Any, path: str | None) -> "MultiStats":
        return cls(
            data={
                _LANE: None if lane is None else lane.data,
                _OPERATORS: None if operators is None else operators.data,
                _CLASS: path,
            }
        )

    @property
    def lane(self) -> AheadStats | None:
        """Return the statistics of encode-ahead; None without any."""
        data = self.data[_LANE]
        return None if data is None else AheadStats(data=data)

    @property
    def operators(self) -> ECConnectorStats | None:
        """Return the statistics of the operator's connector; None without any."""
        data, path = self.data[_OPERATORS], self.data[_CLASS]
        if data is None or path is None:
            return None
        module, _, name = path.partition(":")
        return getattr(import_module(module), name).build_ec_connector_stats(data)

    def reset(self) -> None:
        self.data: dict[str, Any] = {_LANE: None, _OPERATORS: None, _CLASS: self.data.get(_CLASS)}

    def is_empty(self) -> bool:
        return all(one is None or one.is_empty() for one in (self.lane, self.operators))

    def aggregate(self, other: ECConnectorStats) -> "MultiStats":
        assert isinstance(other, MultiStats)
        return MultiStats._with(
            merged(self.lane, other.lane),
            merged(self.operators, other.operators),
            self.data[_CLASS] or other.data[_CLASS],
        )

    def reduce(self) -> dict[str, int | float]:
        """Summarise the statistics for vLLM's log line."""
        return {
            name: value
            for one in (self.lane, self.operators)
            if one is not None
            for name, value in one.reduce().items()
        }


class MultiProm(ECConnectorPromMetrics):
    """Exports the metrics of both connectors; ``operators`` is None if the operator's has none."""

    def __init__(self, lane: AheadProm, operators: ECConnectorPromMetrics | None) -> None:
        self._parts = {_LANE: lane, _OPERATORS: operators}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, prom in self._parts.items():
            data = transfer_stats_data[name]
            if data is not None and prom is not None:
                prom.observe(data, engine_idx)
