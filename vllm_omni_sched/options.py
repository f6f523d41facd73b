"""All options of vllm-omni-sched, with their defaults, bounds and meaning."""

import re
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

CPU_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
"""Processors, as in ``1,4-7``."""


class Toggle(str, Enum):
    """``auto``: where this vLLM has the extension points; ``on``: or refuse to start; ``off``: never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class ReleaseMode(str, Enum):
    """What becomes of the raw data of committed items."""

    SPILL = "spill"
    KEEP = "keep"


class EvictionOrder(str, Enum):
    """Which freeable encoding leaves the encoder cache first."""

    AGE = "age"  # the one that has been freeable for longest, as in vLLM
    WORTH = "worth"  # the one worth least


class OrderMode(str, Enum):
    """In which order waiting requests run."""

    ARRIVAL = "arrival"
    SLA = "sla"


class ClientClass(str, Enum):
    """A class that a client may name for its request."""

    REALTIME = "realtime"
    INTERACTIVE = "interactive"
    BATCH = "batch"


class ControlMode(str, Enum):
    """What steers a limit."""

    OFF = "off"
    PID = "pid"
    AIMD = "aimd"
    ADAPTIVE = "adaptive"
    LEARNED = "learned"


class OmniSchedConfig(BaseModel):
    """All options, with their defaults. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    windows: Toggle = Field(
        Toggle.AUTO,
        description="Visit only the items in a step's window, where vLLM scans them all or needs sorted ends.",
    )
    encoder_cache: Toggle = Field(
        Toggle.AUTO,
        description="Use OmniEncoderCacheManager: an index and reference counts, so that freeing an item is O(1).",
    )
    encoder_cache_order: EvictionOrder = Field(
        EvictionOrder.AGE,
        description="Which encoding goes when the encoder cache is full: the one unused longest, as in vLLM, or the "
        "one of least worth, seconds to encode it again × recent uses / bytes.",
    )
    encoder_cache_host_bytes: int = Field(
        0,
        ge=0,
        description="Host memory for encodings that left the encoder cache, in bytes: they are restored, not encoded "
        "again, where that is quicker. Needs `encode_ahead`; 0 keeps none.",
    )
    strip_frontier: Toggle = Field(
        Toggle.AUTO,
        description="Strip covered items' data from worker messages by moving a frontier, not by walking all items.",
    )
    pending_range: Toggle = Field(
        Toggle.AUTO,
        description="Track the encoder inputs that workers hold as an index range (vLLM 0.33, model runner V2).",
    )
    kv_event_window: Toggle = Field(
        Toggle.AUTO,
        description="Compute the extra keys of KV-cache events from the block's first item, not the request's.",
    )
    session_delta: Toggle = Field(
        Toggle.AUTO,
        description="Send workers only what is new in a resumed streaming session.",
    )
    mrope_append: Toggle = Field(
        Toggle.AUTO,
        description="Extend the M-RoPE positions of a session, not recompute them, for models where that is exact: "
        "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-ASR, GLM-4.1V, ERNIE-4.5-VL and models that inherit their positions.",
    )
    release: ReleaseMode = Field(
        ReleaseMode.SPILL,
        description="Raw data of a session's committed items: 'spill' to a private file, read back on preemption, "
        "or 'keep' in memory.",
    )
    release_batch_items: int = Field(
        64,
        ge=1,
        le=65536,
        description="Items that are released together; also the number a session must commit before any is.",
    )
    spill_dir: str | None = Field(
        None,
        description="Folder of the spill files; default is the system's temporary folder. "
        "Not a memory-backed one, or nothing is saved.",
    )
    spill_max_bytes: int = Field(
        8 << 30,
        ge=0,
        description="Bound on one session's spill file, in bytes; beyond it data stays in memory.",
    )
    encode_ahead: bool = Field(
        False,
        description="Encode the items of waiting requests in a lane beside the LLM, so that tokens of others go on.",
    )
    encode_lane_nice: int | None = Field(
        None,
        ge=0,
        le=19,
        description="CPUs only: niceness of encoder processes; default is 10 on the LLM's processors, 0 on others.",
    )
    encode_lane_cpus: str = Field(
        "auto",
        description="CPUs only: where encoder processes work. 'auto': one on the cores that no thread of the LLM is "
        "bound to, if those are at least half as many, and one on the LLM's; 'shared': one on the LLM's; or a list of "
        "its processors, such as '1,4-7'.",
    )
    encode_lane_sms: int | None = Field(
        None,
        ge=1,
        description="CUDA only: streaming multiprocessors that the lane may use, as a green context; default is all.",
    )
    encode_lane_min_share: float = Field(
        0.1, gt=0.0, le=1.0, description="Part of the time that the lane may take however slow tokens come, in (0, 1]."
    )
    itl_target_ms: float = Field(
        50.0,
        gt=0.0,
        le=60_000.0,
        description="Inter-token latency to keep, in milliseconds; above it the lane's share falls. Where "
        "`prefill_control` aims at longer steps, the share falls above that aim only.",
    )
    decode_pace: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="While an encode runs on a CPU, steps come no faster than this part of the inter-token-latency "
        "target, so that the encoder gets its share of the processors; default is 0.8, or 0.3 where it has some of its "
        "own; 0 for as fast as they can.",
    )
    waiting_order: OrderMode = Field(
        OrderMode.ARRIVAL,
        description="Waiting requests run in the order of 'arrival' (vLLM's own queue), or of 'sla': class, deadline "
        "slack, priority, cost, what they share, and age.",
    )
    max_wait_seconds: float = Field(
        30.0,
        gt=0.0,
        le=3600.0,
        description="A request that waited as long as this runs before all others; with `waiting_order: sla`.",
    )
    realtime_ttft_ms: float = Field(300.0, gt=0.0, description="TTFT promised to streaming sessions.")
    realtime_itl_ms: float = Field(50.0, gt=0.0, description="Inter-token latency promised to streaming sessions.")
    interactive_ttft_ms: float = Field(2000.0, gt=0.0, description="TTFT promised to all other requests.")
    interactive_itl_ms: float = Field(100.0, gt=0.0, description="Inter-token latency promised to them.")
    client_classes: tuple[ClientClass, ...] = Field(
        (ClientClass.INTERACTIVE, ClientClass.BATCH),
        description="Classes that a request may name in `omni_class`; one that names another is refused. Streaming "
        "sessions are realtime without naming it; add `realtime` where every client may go before all others.",
    )
    client_ttft_ms_min: float | None = Field(
        None,
        ge=0.0,
        description="Least TTFT that a request may ask for in `omni_ttft_ms`; default is `realtime_ttft_ms`, 0 for "
        "any.",
    )
    client_itl_ms_min: float | None = Field(
        None,
        ge=0.0,
        description="Least inter-token latency that a request may ask for in `omni_itl_ms`; default is "
        "`realtime_itl_ms`, 0 for any.",
    )
    slo_metrics: bool = Field(
        False, description="Measure TTFT, inter-token latency and goodput by class; some microseconds a step."
    )
    batch_control: ControlMode = Field(
        ControlMode.OFF, description="What steers how many requests run at once, on the latency of steps."
    )
    batch_min: int = Field(1, ge=1, description="Least requests that may run at once, under `batch_control`.")
    batch_max: int = Field(32, ge=1, description="Most requests that may run at once, under `batch_control`.")
    prefill_control: ControlMode = Field(
        ControlMode.OFF,
        description="What steers how many prompt tokens a step computes beside decodes, on the latency of steps; "
        "'adaptive' learns what a token costs; 'learned' has it aim higher or lower, as a bandit chooses that was "
        "trained in the simulator to keep `interactive_itl_ms`.",
    )
    prefill_min_tokens: int = Field(64, ge=1, description="Least prompt tokens of a step, under `prefill_control`.")
    control_interval_ms: float = Field(
        1000.0, gt=0.0, le=60_000.0, description="Time between decisions of 'pid', 'aimd' and 'learned'."
    )
    control_target_ms: float = Field(
        50.0, gt=0.0, le=60_000.0, description="Latency of a step that the controls aim at."
    )
    pieces: bool = Field(
        False, description="Long prompts go in pieces, while others wait: each gets a fair part of a step's tokens."
    )
    encoder_split: bool = Field(
        False,
        description="Beside decodes, encode in a step what itl_target_ms allows; split it fairly among modalities.",
    )
    encode_rounds: bool = Field(
        False,
        description="Items whose encode would break the inter-token latency of those who decode are held back, and "
        "several requests' items are encoded while nobody decodes; for engines that encode in the step.",
    )
    video: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the video loader `omni_flashcodec`.",
    )
    metrics: bool = Field(True, description="Publish vllm:omni_sched_* on vLLM's /metrics.")
    metrics_interval_seconds: float = Field(
        1.0, ge=0.1, le=60.0, description="How often the engine core publishes its metrics, in seconds."
    )
    allow_untested_vllm: bool = Field(
        False,
        description="Start on a vLLM outside the supported versions, with the features whose points are found.",
    )

    @field_validator(
        "windows",
        "encoder_cache",
        "strip_frontier",
        "pending_range",
        "kv_event_window",
        "session_delta",
        "mrope_append",
        mode="before",
    )
    @classmethod
    def _toggle(cls, value: Any) -> Any:
        # YAML 1.1 reads bare on/off as booleans.
        if isinstance(value, bool):
            return Toggle.ON if value else Toggle.OFF
        if isinstance(value, str) and value in {t.value for t in Toggle}:
            return Toggle(value)
        return value

    @field_validator("release", mode="before")
    @classmethod
    def _release(cls, value: Any) -> Any:
        return ReleaseMode(value) if isinstance(value, str) and value in {m.value for m in ReleaseMode} else value

    @field_validator("encoder_cache_order", mode="before")
    @classmethod
    def _cache_order(cls, value: Any) -> Any:
        return EvictionOrder(value) if isinstance(value, str) and value in {o.value for o in EvictionOrder} else value

    @field_validator("waiting_order", mode="before")
    @classmethod
    def _order(cls, value: Any) -> Any:
        return OrderMode(value) if isinstance(value, str) and value in {m.value for m in OrderMode} else value

    @field_validator("client_classes", mode="before")
    @classmethod
    def _client_classes(cls, value: Any) -> Any:
        known = {one.value: one for one in ClientClass}
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one in known for one in value):
            raise ValueError(f"must be a list of the classes {', '.join(known)}")
        return tuple(known[one] for one in dict.fromkeys(value))

    @field_validator("batch_control", "prefill_control", mode="before")
    @classmethod
    def _control(cls, value: Any) -> Any:
        if value is False:  # YAML's off
            return ControlMode.OFF
        return ControlMode(value) if isinstance(value, str) and value in {m.value for m in ControlMode} else value

    @model_validator(mode="after")
    def _bounds(self) -> "OmniSchedConfig":
        if self.batch_min > self.batch_max:
            raise ValueError(
                f"option 'batch_min' must not be above 'batch_max': {self.batch_min} > {self.batch_max}; "
                "lower the one or raise the other"
            )
        if self.encode_rounds and self.encode_ahead:
            raise ValueError(
                "options 'encode_rounds' and 'encode_ahead' exclude each other: with the lane nothing is held up that "
                "rounds could spare; leave one of them out"
            )
        if self.batch_control in (ControlMode.ADAPTIVE, ControlMode.LEARNED):
            raise ValueError(
                f"option 'batch_control' must be 'off', 'pid' or 'aimd': '{self.batch_control.value}' is for "
                "prefill_control"
            )
        return self

    @property
    def share_target_seconds(self) -> float:
        """Above this inter-token latency the lane's share falls; steps that prompts fill are not the lane's doing."""
        aims = self.control_target_ms if self.prefill_control is not ControlMode.OFF else 0.0
        return max(self.itl_target_ms, aims) / 1e3

    @field_validator("encode_lane_cpus")
    @classmethod
    def _cpus(cls, value: str) -> str:
        if value not in ("auto", "shared") and not CPU_LIST.fullmatch(value):
            raise ValueError("must be 'auto', 'shared' or a list of processors such as '1,4-7'")
        return value

    @field_validator(
        "metrics_interval_seconds",
        "encode_lane_min_share",
        "decode_pace",
        "itl_target_ms",
        "max_wait_seconds",
        "realtime_ttft_ms",
        "realtime_itl_ms",
        "interactive_ttft_ms",
        "interactive_itl_ms",
        "client_ttft_ms_min",
        "client_itl_ms_min",
        "control_interval_ms",
        "control_target_ms",
        mode="before",
    )
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
