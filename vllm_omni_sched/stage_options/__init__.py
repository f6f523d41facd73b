"""Options of the scheduler over vLLM-Omni's stages, with their defaults, bounds and meaning.

Names and defaults follow the design article on a multimodal batch scheduler for vLLM-Omni (batches of 1 to 32, adjusted
each 1000 ms, to a latency target of 50 ms). `stage_config` reads them.
"""

from enum import Enum
from typing import Any

from pydantic import Field, model_validator

from vllm_omni_sched.stage_options.base import Options
from vllm_omni_sched.stage_options.batching import BatchingOptions
from vllm_omni_sched.stage_options.graph import GraphOptions


class BalancePolicy(str, Enum):
    """Which replica of a stage gets a request."""

    COST = "cost"  # the one that would be through with it first
    LEAST_QUEUE = "least-queue"
    ROUND_ROBIN = "round-robin"
    STOCK = "stock"  # whatever vLLM-Omni is told to use


class ConnectorOptions(Options):
    """A connector, as vLLM-Omni writes it."""

    name: str = Field(min_length=1, description="Registered name, such as `OmniAutoConnector`.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Options of that connector.")


class RecoveryOptions(Options):
    """What happens when a replica dies."""

    enabled: bool = Field(True, description="Repair what has died; otherwise its requests fail, as in vLLM-Omni.")
    restart: bool = Field(True, description="Start a replica that died again; otherwise only others take its requests.")
    max_restarts: int = Field(3, ge=1, description="Restarts of one replica within `window_seconds`, then none.")
    window_seconds: float = Field(300.0, gt=0, description="Time over which restarts are counted.")
    max_redispatches: int = Field(2, ge=0, description="How often a request may move to another replica.")
    max_wait_seconds: float = Field(60.0, ge=0, description="How long a request waits for a replica that restarts.")
    detection_seconds: float = Field(
        1.0, gt=0, le=60, description="Time between looks at whether the processes of replicas live."
    )
    hang_seconds: float | None = Field(
        60.0,
        gt=0,
        description="A replica that hangs for longer, by `monitoring.anomaly` (without which nothing notices it), is "
        "ended; null: never.",
    )


class CreditOptions(Options):
    """Back-pressure from the last stage to the first."""

    enabled: bool = Field(True, description="A stage starts a request only when the next one has room for it.")
    capacity: int = Field(64, ge=1, description="Requests that a stage may hold, waiting and running.")


class RuntimeOptions(Options):
    """What stages run on."""

    connectors: dict[str, ConnectorOptions] = Field(
        default_factory=dict, description="Connectors by name, as vLLM-Omni's own `connectors`."
    )
    edges: dict[str, str] = Field(
        default_factory=dict,
        description="Which of them an edge has, such as `thinker->talker: local`; without it the only one is on all.",
    )
    recovery: RecoveryOptions = Field(RecoveryOptions(), description="What happens when a replica dies.")
    credits: CreditOptions = Field(CreditOptions(), description="Back-pressure from the last stage to the first.")
    stall_seconds: float | None = Field(
        1800.0,
        gt=0,
        description="Last resort: a request that its stage shows no progress with for so long fails; null: never. What "
        "streams makes progress, and so does what waits in the queue while the pipeline puts out anything. If not set, "
        "no less than twice `recovery.hang_seconds` and `recovery.max_wait_seconds`.",
    )
    drain_seconds: float = Field(
        60.0, gt=0, description="How long a replica that is to be moved may take to become empty; else it stays."
    )

    @model_validator(mode="after")
    def _connected(self) -> "RuntimeOptions":
        for edge, name in self.edges.items():
            if not all(part.strip() for part in edge.partition("->")):
                raise ValueError(f"option 'edges.{edge}' must name two stages, such as 'thinker->talker'")
            if name not in self.connectors:
                known = list(self.connectors)
                raise ValueError(f"option 'edges.{edge}' must be one of the connectors {known}, got {name!r}")
        if self.stall_seconds is not None and "stall_seconds" in self.model_fields_set:
            for option, seconds in self._repairs_within().items():
                if self.stall_seconds <= seconds:
                    raise ValueError(
                        f"option 'stall_seconds' must be above 'recovery.{option}', else requests fail before their "
                        f"replica is repaired: {self.stall_seconds:g} <= {seconds:g}; raise the one or lower the other"
                    )
        unused = [name for name in self.connectors if name not in self.edges.values()]
        if unused and (self.edges or len(unused) > 1):
            raise ValueError(f"option 'connectors.{unused[0]}': no edge has it; name one in 'edges', or remove it")
        return self

    def _repairs_within(self) -> dict[str, float]:
        """How long recovery may take to notice and to repair what keeps a request from its replica, by option."""
        recovery = self.recovery
        seconds = {"hang_seconds": recovery.hang_seconds, "max_wait_seconds": recovery.max_wait_seconds}
        return {name: value for name, value in seconds.items() if value is not None and recovery.enabled}

    @property
    def stalls_after_seconds(self) -> float | None:
        """`stall_seconds`; where that is not given, no less than twice what recovery may take."""
        if self.stall_seconds is None or "stall_seconds" in self.model_fields_set:
            return self.stall_seconds
        return max(self.stall_seconds, *(2 * seconds for seconds in self._repairs_within().values()), 0.0)


class BalancingOptions(Options):
    """Which replica gets a request."""

    policy: BalancePolicy = Field(
        BalancePolicy.COST,
        strict=False,
        description=(
            "'cost': the one that is through with it first; or vLLM-Omni's ways; 'stock' changes nothing. Of a stage "
            "with more than 32 replicas, four with room that are drawn by lot are compared, and up to four that have "
            "something of the request's."
        ),
    )
    affinity_slack: float = Field(
        0.25, ge=0, description="How much later a request may end for going where its data is; a part of its time."
    )


class PoolShares(Options):
    """Parts of the total that are guaranteed; what is left over is lent to who needs it."""

    text: float = Field(0.2, ge=0, le=1, description="Part for text; with 0 it has only what others lend.")
    image: float = Field(0.3, ge=0, le=1, description="Part for images; 0 as for text.")
    audio: float = Field(0.2, ge=0, le=1, description="Part for audio; 0 as for text.")
    video: float = Field(0.3, ge=0, le=1, description="Part for video; 0 as for text.")

    @model_validator(mode="after")
    def _sum(self) -> "PoolShares":
        parts = self.model_dump()
        total = sum(parts.values())
        if total > 1 + 1e-9:
            listed = " + ".join(f"{name} {part:g}" for name, part in parts.items())
            raise ValueError(f"shares must sum to 1 at most: {listed} = {total:g}; lower one, those left out count too")
        return self


class PoolOptions(Options):
    """Memory by modality."""

    total_bytes: int | None = Field(None, ge=1, description="Bytes of all pools; null: there are no pools.")
    shares: PoolShares = Field(PoolShares(), description="Guaranteed parts of `total_bytes`.")


class AnomalyOptions(Options):
    """What counts as ill."""

    enabled: bool = Field(True, description="Look for stages that hang, leaks, stuck queues and sick edges.")
    interval_seconds: float = Field(1.0, gt=0, description="Time between looks.")
    min_stage_seconds: float = Field(
        1.0, gt=0, description="Requests that have been in a stage for less are no anomaly."
    )
    max_stage_seconds: float = Field(
        600.0, gt=0, description="A request in a stage for longer is an anomaly, whatever the stage's history says."
    )
    leak_significance: float = Field(
        0.001, gt=0, lt=0.5, description="Chance that the trend test may take of calling a healthy run a leak."
    )
    leak_horizon_seconds: float = Field(
        86400.0, gt=0, description="A trend is a leak if it would fill the memory within this time."
    )
    edge_error_rate: float = Field(0.02, gt=0, lt=1, description="Edges that fail less often than this are not sick.")

    @model_validator(mode="after")
    def _ordered(self) -> "AnomalyOptions":
        if self.min_stage_seconds > self.max_stage_seconds:
            raise ValueError(
                f"option 'min_stage_seconds' must not be above 'max_stage_seconds': {self.min_stage_seconds:g} > "
                f"{self.max_stage_seconds:g}; lower the one or raise the other"
            )
        return self


class ForecastOptions(Options):
    """What load will come."""

    enabled: bool = Field(False, description="Forecast arrivals by modality; needs the extra `forecast`.")
    bin_seconds: float = Field(60.0, gt=0, description="Arrivals are counted over this time.")
    season_bins: int = Field(1440, ge=2, description="Bins after which the pattern comes again; 1440 minutes a day.")
    horizon_seconds: float = Field(600.0, gt=0, description="How far to look ahead.")
    move_replicas: bool = Field(False, description="Give replicas of one stage to another ahead of the load.")
    max_replicas: int = Field(8, ge=1, description="Most replicas of a stage that moves may make.")

    @model_validator(mode="after")
    def _far_enough(self) -> "ForecastOptions":
        if self.horizon_seconds < self.bin_seconds:
            raise ValueError(
                f"option 'horizon_seconds' must not be below 'bin_seconds': {self.horizon_seconds:g} < "
                f"{self.bin_seconds:g}; raise the one or lower the other"
            )
        if self.move_replicas and not self.enabled:
            raise ValueError("option 'move_replicas' needs 'enabled': turn both on, or 'move_replicas' off")
        return self


class MonitoringOptions(Options):
    """What is watched."""

    enabled: bool = Field(
        True, description="Watch stages and publish `vllm:omni_sched_stage_*`; otherwise nothing in this section acts."
    )
    anomaly: AnomalyOptions = Field(AnomalyOptions(), description="What counts as ill.")
    forecast: ForecastOptions = Field(ForecastOptions(), description="What load will come.")

    @model_validator(mode="after")
    def _watched(self) -> "MonitoringOptions":
        if self.forecast.enabled and not self.enabled:
            raise ValueError("option 'forecast.enabled' needs 'enabled': turn both on, or the forecast off")
        return self


class StageSchedConfig(Options):
    """All options of the scheduler over stages."""

    runtime: RuntimeOptions = Field(RuntimeOptions(), description="What stages run on.")
    graph: GraphOptions = Field(GraphOptions(), description="What the work is.")
    batching: BatchingOptions = Field(BatchingOptions(), description="How much runs at once.")
    balancing: BalancingOptions = Field(BalancingOptions(), description="Which replica gets a request.")
    pools: PoolOptions = Field(PoolOptions(), description="Memory by modality.")
    monitoring: MonitoringOptions = Field(MonitoringOptions(), description="What is watched.")

    @model_validator(mode="after")
    def _notices(self) -> "StageSchedConfig":
        recovery, monitoring = self.runtime.recovery, self.monitoring
        asked = recovery.hang_seconds is not None and "hang_seconds" in recovery.model_fields_set
        for name, on in (("enabled", monitoring.enabled), ("anomaly.enabled", monitoring.anomaly.enabled)):
            if asked and not on:
                raise ValueError(
                    f"option 'runtime.recovery.hang_seconds' is {recovery.hang_seconds:g}, but without "
                    f"'monitoring.{name}' nothing notices a replica that hangs: turn that on, or set 'hang_seconds' to "
                    "null"
                )
        return self
