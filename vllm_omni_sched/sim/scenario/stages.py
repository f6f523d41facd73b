"""Define the kinds of stages that a request goes through, in order."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.config.units import FractionalBytes

HW_DECODERS = 2
"""vLLM's default of `hw_decoders`: videos that its backend `pynvvideocodec` decodes at a time."""
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_-]*$"


class Link(Options):
    """Link from a stage to those that read it."""

    latency_seconds: float = Field(0.0, ge=0, description="Seconds that any message takes.")
    bytes_per_second: FractionalBytes | None = Field(None, gt=0, description="Bandwidth; default: unlimited.")
    bytes_per_embed: FractionalBytes = Field(
        0.0, ge=0, description="Bytes sent for each encoder embedding of a request."
    )


class _Stage(Options):
    """Options that all kinds of stages have."""

    name: str = Field(pattern=NAME, description="Unique; overrides use it: `stages.NAME.replicas`.")
    replicas: int = Field(1, ge=1, le=100_000, description="Replicas at the start.")
    balance: Literal["round_robin", "least_queue", "cost"] | None = Field(
        None, description="Choice of a replica; default: as `[orchestration]` sets it, else `round_robin`."
    )
    reads: tuple[str, ...] | None = Field(
        None,
        description="Names of earlier stages whose output it reads; several stages may read one, and one may read "
        "several. Default: the stage before.",
    )
    link: Link = Field(Link(), description="Link to each stage that reads this one.")
    output: bool = Field(False, description="The client waits for this stage's output; default: the last stage.")

    @field_validator("reads", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @property
    def devices_each(self) -> int:
        """Return the accelerators of a replica; 0 for stages that have no `devices`."""
        return int(getattr(self, "devices", 0))

    @property
    def cores_each(self) -> int:
        """Return the processor cores that a replica has for itself."""
        return 0


class EngineStage(_Stage):
    """A vLLM engine: continuous batching, chunked prefill, the policies of `[policy]`."""

    kind: Literal["engine"] = Field(description="A vLLM engine.")
    model: str | None = Field(None, description="Name of a model whose costs are known.")
    calibration: str | None = Field(
        None, description="File of measured costs, relative to the scenario; instead of `model`."
    )
    devices: int = Field(1, ge=1, le=1024, description="Accelerators of a replica (tensor parallel).")
    max_num_seqs: int = Field(256, ge=1, description="Requests that run at once, as in vLLM.")
    max_num_batched_tokens: int = Field(8192, ge=1, description="Tokens of a step, as in vLLM.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Fraction of the memory, as in vLLM.")
    prompt_tokens: int | None = Field(
        None, ge=1, description="Prompt tokens of each request, in a later stage of a pipeline; default: the request's."
    )
    tokens_each: float = Field(
        1.0, gt=0, description="Tokens made for each output token of a request, such as the codes of a talker."
    )
    kv_tokens: int | None = Field(
        None, ge=1, description="KV cache of a replica, in tokens; default: what fits in the memory."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Tokens of the context, as in vLLM; default: the model's, if the KV cache holds them."
    )
    largest_item_embeds: int | None = Field(
        None,
        ge=1,
        description="Embeddings of the model's largest item, as vLLM finds it at start; default: by the limits of the "
        "model's processor and `max_model_len`; of a calibration: none is larger than a step. Pixel limits in "
        "`--mm-processor-kwargs` and modalities switched off by `--limit-mm-per-prompt` lower it.",
    )
    encoder_reserve_embeds: int | None = Field(
        None,
        ge=1,
        description="Embeddings that can be encoded at a time in the memory that the engine sets aside for them; with "
        "`policy.kv_lending` more can, in lent KV blocks. Default: those of a step.",
    )
    encode_bytes_per_embed: FractionalBytes | None = Field(
        None,
        gt=0,
        description="Memory of activations for each embedding that is encoded at a time. The memory for "
        "`encoder_reserve_embeds` is then not available to the KV cache, unless `kv_tokens` is given; default: they "
        "are within the efficiency's `activation_bytes`. Needs `model`.",
    )
    lane_items: int = Field(1, ge=1, description="Items that the encode-ahead lane encodes at a time.")
    lane_on: Literal["device", "beside", "shared"] = Field(
        "device",
        description="The lane runs on the engine's `device`, or on processors: its own and the LLM's (`beside`), or "
        "only the LLM's (`shared`).",
    )

    @model_validator(mode="after")
    def _costs(self) -> "EngineStage":
        _one_of(self.model, self.calibration)
        return self


class EncoderStage(_Stage):
    """Encoders on devices of their own (encoder disaggregation)."""

    kind: Literal["encoder"] = Field(description="Encoders apart from the LLM.")
    model: str | None = Field(None, description="Name of a model whose costs are known.")
    calibration: str | None = Field(None, description="File of measured costs, instead of `model`.")
    devices: int = Field(1, ge=1, le=1024, description="Accelerators of a replica.")
    batch_items: int = Field(8, ge=1, description="Most items that are encoded together.")

    @model_validator(mode="after")
    def _costs(self) -> "EncoderStage":
        _one_of(self.model, self.calibration)
        return self


class VideoStage(_Stage):
    """Nodes that decode video; a replica is a node.

    Without ``collaborative`` it is stock vLLM, and a replica is an API server: with ``cpu`` its loader threads run
    OpenCV, with ``nvdec`` its backend ``pynvvideocodec`` decodes on one GPU, ``hw_decoders`` videos at a time.
    """

    kind: Literal["video"] = Field(description="Nodes that decode video.")
    decoders: Literal["cpu", "nvdec"] = Field("cpu", description="Processor cores, or engines of a GPU.")
    per_replica: int = Field(
        8,
        ge=1,
        le=4096,
        description="Decoders of a node. Without `collaborative`, of `nvdec`: `hw_decoders` in vLLM's "
        "`--media-io-kwargs`, and the default is 2, as there.",
    )
    collaborative: bool = Field(True, description="All decoders of a node share a video; otherwise each video has one.")
    megapixels_per_second: float | None = Field(
        None, gt=0, description="Speed of one decoder; default: that of the costs."
    )
    piece_seconds: float | None = Field(
        None, ge=0, description="Time to begin one more piece of a video; default: that of the costs."
    )

    @model_validator(mode="before")
    @classmethod
    def _as_in_vllm(cls, value: Any) -> Any:
        if (
            not isinstance(value, Mapping)
            or value.get("decoders") != "nvdec"
            or value.get("collaborative") is not False
        ):
            return value
        return {"per_replica": HW_DECODERS, **value}

    @property
    def cores_each(self) -> int:
        """Return the processor cores that a replica has for itself."""
        return self.per_replica if self.decoders == "cpu" else 0


class ServersStage(_Stage):
    """Servers that each work on one request at a time, first come first served."""

    kind: Literal["servers"] = Field(description="Servers for one request each: DiT, TTS, closed forms.")
    per_replica: int = Field(1, ge=1, le=100_000, description="Servers of a replica.")
    devices: int = Field(0, ge=0, le=1024, description="Accelerators of a replica.")
    seconds: float = Field(gt=0, description="Mean service time of a request, such as of all steps of a DiT.")
    service: Literal["deterministic", "exponential"] = Field(
        "deterministic", description="Distribution of service times: all the mean, or exponential, as in M/M/c."
    )


Stage = Annotated[EngineStage | EncoderStage | VideoStage | ServersStage, Field(discriminator="kind")]
"""One of the kinds of stages, by its ``kind``."""


def _one_of(model: str | None, calibration: str | None) -> None:
    if (model is None) == (calibration is None):
        given = "neither is set" if model is None else "both are set"
        raise ValueError(f"give one of 'model' and 'calibration': {given}")
