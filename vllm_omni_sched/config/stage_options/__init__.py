"""Options of the scheduler over vLLM-Omni's stages, with their defaults, bounds and meaning.

Names and defaults follow the design article on a multimodal batch scheduler for vLLM-Omni (batches of 1 to 32, adjusted
each 1000 ms, to a latency target of 50 ms). Its own file loads as it is printed: its names are further names of these
options. `config.stage_yaml` reads them.
"""

import re
from collections.abc import Collection, Mapping
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.config.stage_options.batching import BatchingOptions
from vllm_omni_sched.config.stage_options.graph import GraphOptions
from vllm_omni_sched.config.units import Bytes
from vllm_omni_sched.config.validators import absolute

_HOST = re.compile(r"\[?[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*\]?|[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
"""An IP address, or a name."""


class BalancePolicy(str, Enum):
    """Policy that chooses the replica of a stage for a request."""

    COST = "cost"  # the one that would finish it first
    LEAST_QUEUE = "least-queue"
    ROUND_ROBIN = "round-robin"
    STOCK = "stock"  # the policy that vLLM-Omni is configured with


class ConnectorOptions(Options):
    """A connector, written as in vLLM-Omni's configuration."""

    name: str = Field(min_length=1, description="Registered name, such as `OmniAutoConnector`.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Options of the connector.")


class BranchErrors(str, Enum):
    """What an error of a stage ends where a request has several outputs."""

    REQUEST = "request"
    OUTPUT = "output"


class RecoveryOptions(Options):
    """Options of recovery from the death of a replica."""

    enabled: bool = Field(
        True, description="Recover the requests of a dead replica; otherwise they fail, as in vLLM-Omni."
    )
    restart: bool = Field(True, description="Restart a dead replica; otherwise only others take its requests.")
    max_restarts: int = Field(3, ge=1, description="Most restarts of one replica within `window_seconds`.")
    window_seconds: float = Field(300.0, gt=0, description="Time over which restarts are counted.")
    max_redispatches: int = Field(2, ge=0, description="How often a request may move to another replica.")
    max_wait_seconds: float = Field(60.0, ge=0, description="How long a request waits for a replica that restarts.")
    hang_seconds: float | None = Field(
        60.0,
        gt=0,
        description="A replica that hangs longer is terminated; `monitoring.anomaly`, which detects hangs, must be "
        "on; null: never.",
    )
    act_on: list[Literal["timeout", "leak", "sick_edge"]] = Field(
        default_factory=list,
        description="Anomalies of a replica after which it is replaced: requests that are in a stage for too long or a "
        "stuck queue (timeout), a memory leak, transfers that fail or are slow (sick_edge). Others are only logged "
        "and counted.",
    )
    dry_run: bool = Field(False, description="Only log, count and record what `act_on` would lead to.")
    cooldown_seconds: float = Field(
        300.0, ge=0, description="Least time between two replacements in a stage because of `act_on`."
    )


class HostOptions(Options):
    """Options of stages on several hosts (`--stage-id`)."""

    standby: list[str] = Field(
        default_factory=list,
        description="Addresses of hosts whose replicas get requests only while no other replica of their stage serves.",
    )
    link_bytes_per_second: Bytes | None = Field(
        None,
        ge=1,
        description="Speed of the links of hosts; a replica on another host then costs the time of the payload. null: "
        "all hosts count as equally near.",
    )
    links: dict[str, Bytes] = Field(
        default_factory=dict, description="The same of the link of a single host, by its address."
    )

    @field_validator("standby", "links")
    @classmethod
    def _hosts(cls, value: Collection[str]) -> Collection[str]:
        for host in value:
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is no address of a host: give an IP address or the name of a host")
        return value


class CreditOptions(Options):
    """Options of back-pressure from the last stage to the first."""

    enabled: bool = Field(False, description="A stage starts a request only when the next one has room for it.")
    capacity: int = Field(64, ge=1, description="Most requests that a stage may hold, waiting and running.")

    @model_validator(mode="after")
    def _enabled(self) -> "CreditOptions":
        self.check_enabled()
        return self


class RuntimeOptions(Options):
    """Options of connectors, recovery, starts and back-pressure."""

    connectors: dict[str, ConnectorOptions] = Field(
        default_factory=dict, description="Connectors by name, as in vLLM-Omni's own `connectors`."
    )
    edges: dict[str, str] = Field(
        default_factory=dict,
        description="Connector of an edge, such as `thinker->talker: local`; if unset, the only one is on all edges, "
        "and several are the routes of all edges.",
    )
    recovery: RecoveryOptions = Field(RecoveryOptions(), description="Recovery from the death of a replica.")
    hosts: HostOptions = Field(HostOptions(), description="Stages on several hosts.")
    credits: CreditOptions = Field(CreditOptions(), description="Back-pressure from the last stage to the first.")
    stall_seconds: float | None = Field(
        1800.0,
        gt=0,
        description="Last resort: a request without progress for so long fails; null: never. A request that "
        "streams makes progress, and so does one in the queue while the pipeline puts out anything. If not set, "
        "at least twice `recovery.hang_seconds` and `recovery.max_wait_seconds`.",
    )
    branch_errors: BranchErrors = Field(
        BranchErrors.REQUEST,
        strict=False,
        description="What the error of a stage ends if the request has outputs that do not depend on it, in a pipeline "
        "with branches: the whole 'request', or only the 'output'.",
    )
    drain_seconds: float = Field(
        60.0, gt=0, description="How long a replica that is to be moved may take to become empty; after that it stays."
    )

    @model_validator(mode="after")
    def _recovers(self) -> "RuntimeOptions":
        if self.recovery.act_on and not self.recovery.enabled:
            raise ValueError("option 'recovery.act_on' needs 'recovery.enabled': turn that on, or remove 'act_on'")
        if self.recovery.dry_run and not self.recovery.act_on:
            raise ValueError("option 'recovery.dry_run' needs 'recovery.act_on': name anomalies there, or remove it")
        return self

    @model_validator(mode="after")
    def _connected(self) -> "RuntimeOptions":
        circle: TopologicalSorter[str] = TopologicalSorter()
        for edge, name in self.edges.items():
            start, _, end = (part.strip() for part in edge.partition("->"))
            if not (start and end) or start == end:
                raise ValueError(f"option 'edges.{edge}' must name two stages, such as 'thinker->talker'")
            circle.add(end, start)
            if name not in self.connectors:
                known = list(self.connectors)
                raise ValueError(f"option 'edges.{edge}' must be one of the connectors {known}, got {name!r}")
        try:
            circle.prepare()
        except CycleError as error:
            raise ValueError(
                f"option 'edges': {'->'.join(error.args[1])} is a circle, so that no stage of it could start: remove "
                "one of these edges"
            ) from None
        if self.stall_seconds is not None and "stall_seconds" in self.model_fields_set:
            for option, seconds in self._repairs_within().items():
                if self.stall_seconds <= seconds:
                    raise ValueError(
                        f"option 'stall_seconds' must be above 'recovery.{option}', else requests fail before their "
                        f"replica is repaired: {self.stall_seconds:g} <= {seconds:g}; raise the one or lower the other"
                    )
        unused = [name for name in self.connectors if name not in self.edges.values()]
        if unused and self.edges:
            raise ValueError(
                f"option 'connectors.{unused[0]}' is on no edge; name an edge for it in 'edges', or remove it (or "
                "remove 'edges': then each message of each edge takes the connector that suits it)"
            )
        return self

    def _repairs_within(self) -> dict[str, float]:
        """Return how long recovery may take to detect and to repair a failure, by option."""
        recovery = self.recovery
        seconds = {"hang_seconds": recovery.hang_seconds, "max_wait_seconds": recovery.max_wait_seconds}
        return {name: value for name, value in seconds.items() if value is not None and recovery.enabled}

    @property
    def stalls_after_seconds(self) -> float | None:
        """Return `stall_seconds`; if it is not set, at least twice the time that recovery may take."""
        if self.stall_seconds is None or "stall_seconds" in self.model_fields_set:
            return self.stall_seconds
        return max(self.stall_seconds, *(2 * seconds for seconds in self._repairs_within().values()), 0.0)


class BalancingOptions(Options):
    """Options of choosing the replica of a request."""

    policy: BalancePolicy = Field(
        BalancePolicy.COST,
        strict=False,
        description=(
            "'cost': the replica that finishes it first; or vLLM-Omni's policies; 'stock' changes nothing. In a stage "
            "with more than 32 replicas, four random ones with room are compared, and up to four that have "
            "data of the request."
        ),
    )
    affinity_slack: float = Field(
        0.25, ge=0, description="How much later a request may end to run where its data is, as a fraction of its time."
    )


LEAST_POOL, MOST_POOL = 64 << 10, 1 << 40


class PoolOptions(Options):
    """Options of the memory pools of connectors, by modality."""

    text_pool_size: Bytes | None = Field(
        None,
        ge=LEAST_POOL,
        le=MOST_POOL,
        description="First size of the pool of ids in the shared memory of `runtime.connectors`; it grows to four "
        "times as much. Default: 4 MiB, and it grows to 1 GiB.",
    )
    image_pool_size: Bytes | None = Field(
        None, ge=LEAST_POOL, le=MOST_POOL, description="The same for features and pixels. Default: 4 MiB, to 8 GiB."
    )
    audio_pool_size: Bytes | None = Field(
        None, ge=LEAST_POOL, le=MOST_POOL, description="The same for samples. Default: 4 MiB, to 2 GiB."
    )
    pool_growth_factor: float | None = Field(
        None, gt=1, le=4, description="Factor by which these pools grow. Default: 1.5."
    )

    @property
    def of_connectors(self) -> dict[str, Any]:
        """Return the options that concern the pools of connectors, as far as they are given."""
        names = ("text_pool_size", "image_pool_size", "audio_pool_size", "pool_growth_factor")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class AnomalyOptions(Options):
    """Options of anomaly detection."""

    enabled: bool = Field(True, description="Detect stages that hang, memory leaks, stuck queues and sick edges.")
    interval_seconds: float = Field(1.0, gt=0, description="Time between two checks.")
    max_stage_seconds: float = Field(
        600.0, ge=1, description="A request in a stage for longer is an anomaly, whatever the stage's history."
    )


class ForecastOptions(Options):
    """Options of the load forecast."""

    enabled: bool = Field(False, description="Forecast arrivals by modality; needs the extra `forecast`.")
    bin_seconds: float = Field(60.0, gt=0, description="Width of the bins in which arrivals are counted.")
    season_bins: int = Field(1440, ge=2, description="Bins after which the pattern repeats; 1440 minutes are a day.")
    horizon_seconds: float = Field(600.0, gt=0, description="How far ahead to forecast.")
    move_replicas: bool = Field(False, description="Move replicas from one stage to another ahead of the load.")
    max_replicas: int = Field(8, ge=1, description="Most replicas that a stage may reach by moves.")
    history_path: str | None = Field(
        None,
        description="File that keeps the counts of arrivals over restarts, an absolute path; null: a start begins "
        "without a history.",
    )

    @field_validator("history_path")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return absolute(value, "/var/lib/omni/arrivals.json")

    @model_validator(mode="after")
    def _far_enough(self) -> "ForecastOptions":
        if self.horizon_seconds < self.bin_seconds:
            raise ValueError(
                f"option 'horizon_seconds' must not be below 'bin_seconds': {self.horizon_seconds:g} < "
                f"{self.bin_seconds:g}; raise the one or lower the other"
            )
        if self.move_replicas and not self.enabled:
            raise ValueError("option 'move_replicas' needs 'enabled': turn both on, or 'move_replicas' off")
        if self.history_path is not None and not self.enabled:
            raise ValueError("option 'history_path' needs 'enabled': turn that on, or remove the path")
        return self


class JournalOptions(Options):
    """Options of the journal of faults."""

    path: str | None = Field(
        None,
        description="File for the journal of faults, an absolute path, with a second one beside it (`.1`); null: there "
        "is none. `vllm-omni-sched faults` shows it.",
    )
    max_bytes: Bytes = Field(
        16 << 20, ge=64 << 10, le=1 << 40, description="Most bytes of both files; the oldest entries go."
    )

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return absolute(value, "/var/log/omni/faults.jsonl")


class MonitoringOptions(Options):
    """Options of monitoring."""

    enabled: bool = Field(
        True, description="Monitor stages and publish `vllm:omni_sched_stage_*`; if off, this section has no effect."
    )
    anomaly: AnomalyOptions = Field(AnomalyOptions(), description="Detection of anomalies.")
    forecast: ForecastOptions = Field(ForecastOptions(), description="Forecast of the load.")
    journal: JournalOptions = Field(JournalOptions(), description="Journal of faults.")

    @model_validator(mode="after")
    def _watched(self) -> "MonitoringOptions":
        if self.forecast.enabled and not self.enabled:
            raise ValueError("option 'forecast.enabled' needs 'enabled': turn both on, or the forecast off")
        if self.journal.path is not None and not self.enabled:
            raise ValueError("option 'journal.path' needs 'enabled': turn that on, or remove the path")
        return self


_WITHOUT_SECTION = {
    **dict.fromkeys(("min_batch_size", "max_batch_size", "adjustment_interval", "latency_target"), "batching"),
    **dict.fromkeys(("text_pool_size", "image_pool_size", "audio_pool_size", "pool_growth_factor"), "pools"),
}
"""Options that the design article lists without a section, and the section that they belong to."""


class StageSchedConfig(Options):
    """All options of the scheduler over stages. The options that the design article lists may be outside a section."""

    runtime: RuntimeOptions = Field(RuntimeOptions(), description="Connectors, recovery and back-pressure.")
    graph: GraphOptions = Field(GraphOptions(), description="Merging, order, affinity and placement of work.")
    batching: BatchingOptions = Field(BatchingOptions(), description="Limits on the work that runs at once.")
    balancing: BalancingOptions = Field(BalancingOptions(), description="Choice of a replica for each request.")
    pools: PoolOptions = Field(PoolOptions(), description="Memory pools of connectors, by modality.")
    monitoring: MonitoringOptions = Field(MonitoringOptions(), description="Monitoring of stages.")

    @model_validator(mode="before")
    @classmethod
    def _into_sections(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not _WITHOUT_SECTION.keys() & value.keys():
            return value
        given = dict(value)
        for name, section in _WITHOUT_SECTION.items():
            if name not in given:
                continue
            inside = {} if given.get(section) is None else given[section]
            if not isinstance(inside, Mapping):
                return value  # which is refused for that
            if name in inside:
                raise ValueError(f"options {name!r} and '{section}.{name}' are the same: keep one")
            given[section] = {**inside, name: given.pop(name)}
        return given

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
            if recovery.act_on and not on:
                raise ValueError(
                    f"option 'runtime.recovery.act_on' needs 'monitoring.{name}', which finds anomalies: turn that on, "
                    "or remove 'act_on'"
                )
        return self
