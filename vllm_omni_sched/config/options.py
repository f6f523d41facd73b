"""All options of vllm-omni-sched, with their defaults, bounds and meaning."""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from vllm_omni_sched.config.profiles import PROFILES, Profile, options_of
from vllm_omni_sched.config.units import Bytes, FractionalBytes
from vllm_omni_sched.config.validators import absolute, whole_as_float

CPU_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
"""Pattern of a list of processors, such as ``1,4-7``."""


class Toggle(str, Enum):
    """State of a feature: ``auto`` if this vLLM has the extension points; ``on`` or refuse to start; ``off`` never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class ReleaseMode(str, Enum):
    """Treatment of the raw data of committed items."""

    SPILL = "spill"
    KEEP = "keep"


class OrderMode(str, Enum):
    """Order in which waiting requests run."""

    ARRIVAL = "arrival"
    SLA = "sla"


class ClientClass(str, Enum):
    """A class that a client may name for its request."""

    REALTIME = "realtime"
    INTERACTIVE = "interactive"
    BATCH = "batch"


class ControlMode(str, Enum):
    """Controller of a limit."""

    OFF = "off"
    PID = "pid"
    ADAPTIVE = "adaptive"


EXPERT_GROUP = "expert"


def Expert(default: Any, **kwargs: Any) -> Any:
    """Declare an option that is written in the group ``expert``, because few need it and its effect is internal."""
    return Field(default, json_schema_extra={EXPERT_GROUP: True}, **kwargs)


class OmniSchedConfig(BaseModel):
    """Holds all options, with their defaults. Unknown keys are errors.

    The options of a group are fields like all others; only in the operator's configuration are those that are declared
    by `Expert` written as ``expert: {name: value}``. ``profile`` sets options that the operator does not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    _given: frozenset[str] = PrivateAttr(frozenset())
    _misplaced: tuple[str, ...] = PrivateAttr(())

    profile: Profile = Field(
        Profile.EXACT,
        description="Kind of traffic; it sets several options for that traffic, and single options win over it. "
        "See [Profiles](#profiles).",
    )

    windows: Toggle = Expert(
        Toggle.AUTO,
        description="Visit only the items in a step's window, where vLLM scans all items or needs sorted ends.",
    )
    encoder_cache: Toggle = Expert(
        Toggle.AUTO,
        description="Use OmniEncoderCacheManager: an index and reference counts, so that freeing an item is O(1).",
    )
    encoder_cache_host_bytes: Bytes = Field(
        0,
        ge=0,
        description="Host memory for evicted encodings, in bytes: they are restored instead of encoded again, if that "
        "is quicker. Needs `encode_ahead`; 0 keeps none.",
    )
    encoder_share_bytes: Bytes = Field(
        0,
        ge=0,
        description="Memory of the host for encodings that all engines of this user on the host share, in bytes: an "
        "item that several of them get is encoded by one. Engines with the same model must have the same value; 0 "
        "shares none.",
    )
    encoder_share_wait_seconds: float = Expert(
        10.0,
        ge=0.0,
        le=600.0,
        description="How long a request waits for an encoding that another engine makes, before its own makes it.",
    )
    encoder_share_dir: str = Expert(
        "/dev/shm", description="Folder of shared encodings, in a file system in memory that this user can write."
    )
    strip_frontier: Toggle = Expert(
        Toggle.AUTO,
        description="Strip covered items' data from worker messages by moving a frontier, not by walking all items.",
    )
    pending_range: Toggle = Expert(
        Toggle.AUTO,
        description="Track the encoder inputs that workers hold as an index range (vLLM 0.33, model runner V2).",
    )
    kv_event_window: Toggle = Expert(
        Toggle.AUTO,
        description="Compute the extra keys of KV-cache events from the block's first item, not the request's.",
    )
    session_delta: Toggle = Expert(
        Toggle.AUTO,
        description="Send workers only what is new in a resumed streaming session.",
    )
    mrope_append: Toggle = Expert(
        Toggle.AUTO,
        description="Extend the M-RoPE positions of a session instead of recomputing them, for models where "
        "that is exact: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-ASR, GLM-4.1V, ERNIE-4.5-VL and models that inherit "
        "their positions.",
    )
    release: ReleaseMode = Field(
        ReleaseMode.SPILL,
        description="Treatment of the raw data of a session's committed items: 'spill' it to a private file and "
        "read it back on preemption, or 'keep' it in memory.",
    )
    release_batch_items: int = Expert(
        64,
        ge=1,
        le=65536,
        description="Number of items that are released together; a session must commit that many before any is "
        "released.",
    )
    spill_dir: str | None = Field(
        None,
        description="Folder of the spill files; default is the system's temporary folder. "
        "It must not be memory-backed, or no memory is saved.",
    )
    spill_max_bytes: Bytes = Field(
        8 << 30,
        ge=0,
        description="Bound on one session's spill file, in bytes; beyond it data stays in memory.",
    )
    encode_ahead: bool = Field(
        False,
        description="Encode the items of waiting requests in a lane beside the LLM, while other requests go on "
        "decoding.",
    )
    encode_lane_cpus: str = Field(
        "auto",
        description="CPUs only: processors of the encoder processes. 'auto': one process on the cores that no "
        "thread of the LLM is bound to, if these are at least half as many as the LLM's, and one on the LLM's; "
        "'shared': one process on the LLM's; or a list of processors for one process, such as '1,4-7'. With tensor "
        "parallelism each rank has one process, and the ranks share such a list.",
    )
    encode_lane_sms: int | None = Expert(
        None,
        ge=1,
        description="CUDA only: streaming multiprocessors that the lane may use, as a green context; default is all.",
    )
    encode_lane_min_share: float = Expert(
        0.1,
        gt=0.0,
        le=1.0,
        description="Least share of the device's time that the lane gets, however slow decoding is, in (0, 1].",
    )
    itl_target_ms: float = Field(
        50.0,
        gt=0.0,
        le=60_000.0,
        description="Target inter-token latency, in milliseconds; above it the lane's share falls. If "
        "`prefill_control` aims at longer steps, the share falls only above that aim.",
    )
    decode_pace: float | None = Expert(
        None,
        ge=0.0,
        le=1.0,
        description="While an encode runs on a CPU, steps are spaced by at least this fraction of the "
        "inter-token-latency target, so that the encoder gets its share of the processors; default is 0.8, or 0.25 if "
        "the encoder has processors of its own; 0 does not slow steps.",
    )
    waiting_order: OrderMode = Field(
        OrderMode.ARRIVAL,
        description="Order in which waiting requests run: 'arrival' (vLLM's own queue), or 'sla': by class, deadline "
        "slack, priority, cost, shared items, and age.",
    )
    max_wait_seconds: float = Field(
        30.0,
        gt=0.0,
        le=3600.0,
        description="A request that has waited this long runs before all others; with `waiting_order: sla`.",
    )
    realtime_ttft_ms: float = Field(300.0, gt=0.0, description="TTFT target of streaming sessions, in milliseconds.")
    realtime_itl_ms: float = Field(
        50.0, gt=0.0, description="Inter-token latency target of streaming sessions, in milliseconds."
    )
    interactive_ttft_ms: float = Field(
        2000.0, gt=0.0, description="TTFT target of all other requests, in milliseconds."
    )
    interactive_itl_ms: float = Field(
        100.0, gt=0.0, description="Inter-token latency target of all other requests, in milliseconds."
    )
    client_classes: tuple[ClientClass, ...] = Field(
        (ClientClass.INTERACTIVE, ClientClass.BATCH),
        description="Classes that a request may name in `omni_class`; a request that names another class is refused. "
        "Streaming sessions are realtime without naming it; add `realtime` if every client may go before all others.",
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
        False,
        description="Measure TTFT, inter-token latency, goodput and waiting requests by class; costs some microseconds "
        "per step.",
    )
    batch_control: Literal[ControlMode.OFF, ControlMode.PID] = Expert(
        ControlMode.OFF, description="Controller of the number of running requests, from the step time."
    )
    batch_min: int = Expert(1, ge=1, description="Least number of running requests under `batch_control`.")
    batch_max: int = Expert(32, ge=1, description="Largest number of running requests under `batch_control`.")
    prefill_control: ControlMode = Field(
        ControlMode.OFF,
        description="Controller of the prompt tokens that a step computes beside decodes, from the step time; "
        "'adaptive' learns the cost of a token.",
    )
    prefill_min_tokens: int = Expert(
        64, ge=1, description="Least number of prompt tokens of a step under `prefill_control`."
    )
    control_interval_ms: float = Expert(
        1000.0,
        gt=0.0,
        le=60_000.0,
        description="Time between decisions of 'pid', in milliseconds.",
    )
    control_target_ms: float = Field(
        50.0, gt=0.0, le=60_000.0, description="Step time that the controllers aim at, in milliseconds."
    )
    pieces: bool = Expert(
        False,
        description="Split long prompts into pieces while others wait, so that each gets a fair part of a "
        "step's tokens.",
    )
    kv_lending: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Largest part of the KV cache that encodes may borrow at a time, for activations that do not fit "
        "into the memory set aside for them; 0 lends none. On a CPU with `encode_ahead`, and in the simulator: an "
        "engine on an accelerator refuses it, see [Lending KV blocks](concepts.md#lending-kv-blocks-to-encodes).",
    )
    encode_bytes_per_embed: FractionalBytes = Expert(
        0.0,
        ge=0.0,
        description="With `kv_lending`: memory of activations for each embedding that the lane encodes at a time. "
        "`encode_bytes_per_embed_peak` of `/metrics` is the largest one that was measured; a larger one than this is "
        "logged.",
    )
    encoder_reserve_embeds: int = Expert(
        0,
        ge=0,
        description="With `kv_lending`: embeddings that are encoded at a time in memory outside of the KV cache, which "
        "the operator leaves for them; 0 for as many as a step has tokens.",
    )
    encode_rounds: bool = Field(
        False,
        description="Hold back items whose encode would break the inter-token latency of decoding requests, and encode "
        "the items of several requests while no request decodes; for engines that encode in the step.",
    )
    video: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the video loader `omni_flashcodec`.",
    )
    preprocess: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the preprocessing pool.",
    )
    metrics: bool = Field(True, description="Publish vllm:omni_sched_* on vLLM's /metrics.")
    metrics_interval_seconds: float = Expert(
        1.0, ge=0.1, le=60.0, description="How often the engine core publishes its metrics, in seconds."
    )
    history_path: str | None = Expert(
        None,
        description="File for the history of requests, an absolute path, with a second one beside it (`.1`); default "
        "is none. `vllm-omni-sched explain` reads it. With data parallelism each engine has one, with its rank in the "
        "name.",
    )
    history_bytes: Bytes = Expert(
        64 << 20, ge=64 << 10, le=1 << 40, description="Most bytes of both files of the history; the oldest lines go."
    )
    allow_untested_vllm: bool = Field(
        False,
        description="Start on a vLLM outside the supported versions, with the features whose points are found.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _from_operator(cls, data: Any, handler: ModelWrapValidatorHandler["OmniSchedConfig"]) -> "OmniSchedConfig":
        """Take the options out of the group ``expert``, and add those of the profile."""
        if not isinstance(data, Mapping):
            return handler(data)
        options = dict(data)
        misplaced = tuple(name for name in options if name in cls.expert_names())
        group = options.pop(EXPERT_GROUP, {})
        if not isinstance(group, Mapping):
            raise ValueError(f"option {EXPERT_GROUP!r} must be a mapping of options, got {group!r}")
        for name, value in group.items():
            if name in cls.model_fields and name not in cls.expert_names():
                raise ValueError(f"option {name!r} does not belong to the group {EXPERT_GROUP!r}: move it out of it")
            if name in options:
                raise ValueError(
                    f"option {name!r} is given twice, in the group {EXPERT_GROUP!r} and outside it: keep the former"
                )
            options[str(name)] = value
        given = frozenset(options)
        profile = options.get("profile", Profile.EXACT)
        if isinstance(profile, str) and profile in {one.value for one in Profile}:
            options = {**options, **options_of(Profile(profile), options)}
        config = handler(options)
        config._given, config._misplaced = given, misplaced
        return config

    @classmethod
    def expert_names(cls) -> frozenset[str]:
        """Return the names of the options that belong to the group ``expert``."""
        return frozenset(name for name, field in cls.model_fields.items() if field.json_schema_extra is not None)

    @property
    def given(self) -> frozenset[str]:
        """Return the names of the options that the operator set."""
        return self._given

    @property
    def misplaced(self) -> tuple[str, ...]:
        """Return the options that the operator wrote outside the group ``expert``, where they were in version 0.1."""
        return self._misplaced

    def from_profile(self) -> dict[str, Any]:
        """Return the options that the profile set, with their values."""
        chosen = PROFILES[self.profile].options
        return {name: getattr(self, name) for name in chosen if name in self.model_fields_set - self._given}

    @field_validator("profile", mode="before")
    @classmethod
    def _profile(cls, value: Any) -> Any:
        return Profile(value) if isinstance(value, str) and value in {one.value for one in Profile} else value

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
                "options 'encode_rounds' and 'encode_ahead' exclude each other: encodes in the lane do not "
                "delay decodes, so that rounds have nothing to save; leave one of them out"
            )
        return self

    @property
    def share_target_seconds(self) -> float:
        """Return the inter-token latency above which the lane's share falls, in seconds.

        The lane does not slow down for steps that `prefill_control` makes longer.
        """
        aims = self.control_target_ms if self.prefill_control is not ControlMode.OFF else 0.0
        return max(self.itl_target_ms, aims) / 1e3

    @field_validator("history_path")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return absolute(value, "/var/log/omni/history.jsonl")

    @field_validator("encode_lane_cpus")
    @classmethod
    def _cpus(cls, value: str) -> str:
        if value not in ("auto", "shared") and not CPU_LIST.fullmatch(value):
            raise ValueError("must be 'auto', 'shared' or a list of processors such as '1,4-7'")
        return value

    @field_validator(
        "metrics_interval_seconds",
        "kv_lending",
        "encode_bytes_per_embed",
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
        return whole_as_float(value)
