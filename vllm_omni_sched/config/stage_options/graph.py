"""Options of the graph: merging, order, affinity and placement of work."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.config.units import Bytes, FractionalBytes
from vllm_omni_sched.config.validators import keys_as_text

MODALITIES = ("text", "image", "audio", "video")  # of a request


class MergingOptions(Options):
    """Options of merging identical work of several requests."""

    enabled: bool = Field(True, description="Identical work of several requests in a stage runs once.")


class ClassTargets(Options):
    """Latency targets of a class of requests; null for no target."""

    rank: int = Field(1, ge=0, description="Rank 0 goes first.")
    ttft_ms: float | None = Field(
        None,
        gt=0,
        description="Time to the first output, in milliseconds; the deadline of the whole path if `e2e_ms` is null, "
        "as if all output came at once.",
    )
    e2e_ms: float | None = Field(
        None,
        gt=0,
        description="Time to the last output, in milliseconds: the deadline of the whole path, whatever `ttft_ms` is.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "ClassTargets":
        if self.ttft_ms is not None and self.e2e_ms is not None and self.ttft_ms > self.e2e_ms:
            raise ValueError(
                f"option 'ttft_ms' must not be above 'e2e_ms': {self.ttft_ms:g} > {self.e2e_ms:g}; lower the one or "
                "raise the other"
            )
        return self


def _classes() -> dict[str, ClassTargets]:
    return {
        "realtime": ClassTargets(rank=0, ttft_ms=300.0),
        "interactive": ClassTargets(rank=1),
        "batch": ClassTargets(rank=2),
    }


class PriorityOptions(Options):
    """Options of the order in which requests run, along their whole path."""

    enabled: bool = Field(True, description="Order by class, deadline slack and cost in every stage, not by arrival.")
    classes: dict[str, ClassTargets] = Field(
        default_factory=_classes, min_length=1, description="Classes by name; if set, they replace the default ones."
    )
    default_class: str = Field("interactive", description="Class of a request that does not name one.")
    by_modality: dict[str, str] = Field(
        default_factory=dict, description="Class of such a request by its modality, such as `audio: realtime`."
    )
    client_classes: list[str] | None = Field(
        None,
        description="Classes that a request may name in `omni_class`; one that names another is refused with HTTP 400. "
        "Default: `default_class` and the classes that do not go before it.",
    )
    without_deadline: Literal["arrival", "balanced", "shortest", "longest"] = Field(
        "balanced",
        description="Order of requests of a class without a target: 'arrival' as they came; 'balanced' the same, but "
        "where the longest one would end last if it waited longer, it goes first; 'shortest' minimises mean wait, "
        "'longest' the time until all are done.",
    )
    min_low_share: float = Field(
        0.1, ge=0, lt=1, description="Fraction of starts reserved for requests below the best class that waits."
    )
    max_wait_seconds: float = Field(30.0, gt=0, description="A request that has waited this long goes first.")

    @field_validator("by_modality")
    @classmethod
    def _known_modalities(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if key not in MODALITIES:
                hint = did_you_mean(key, MODALITIES)
                problem = f"option '{key}' must be one of the modalities {list(MODALITIES)}"
                raise ValueError(f"{problem}; {hint}" if hint else problem)
        return value

    @model_validator(mode="after")
    def _known_classes(self) -> "PriorityOptions":
        asked = {"default_class": self.default_class} | {
            f"by_modality.{key}": of for key, of in self.by_modality.items()
        }
        asked |= {f"client_classes.{at}": of for at, of in enumerate(self.client_classes or ())}
        for key, name in asked.items():
            if name not in self.classes:
                raise ValueError(f"option {key!r} must be one of the classes {list(self.classes)}, got {name!r}")
        return self

    @property
    def clients_may_name(self) -> list[str]:
        """Return `client_classes`; if not set, `default_class` and the classes that do not go before it."""
        if self.client_classes is not None:
            return list(self.client_classes)
        first = self.classes[self.default_class].rank
        return [name for name, each in self.classes.items() if each.rank >= first]


class AffinityOptions(Options):
    """Options of sending requests where their data is."""

    enabled: bool = Field(True, description="Requests of one user, or that share items, go to the same replica.")


class DeviceOptions(Options):
    """A device that stages may be placed on."""

    memory_bytes: Bytes = Field(ge=1, description="Memory of the device for stages.")
    speed: float = Field(1.0, gt=0, description="Speed as a multiple of the device on which `profiles` were measured.")


class ProfileOptions(Options):
    """Resource needs of a stage."""

    memory_bytes: Bytes = Field(ge=1, description="Memory that the stage holds, on all its devices together.")
    seconds: float = Field(gt=0, description="Time for each request on a device of speed 1.")
    weights_bytes: Bytes | None = Field(
        None, ge=0, description="Part of `memory_bytes` that is loaded when the stage moves; default: all of it."
    )
    tensor_parallel: dict[int, float] = Field(
        default_factory=dict,
        description="Efficiency of the stage by each `tensor_parallel_size` that it may have besides 1: with `2: 0.9` "
        "it is 1.8 times as fast on two devices as on one.",
    )

    @property
    def loaded_bytes(self) -> int:
        """Return the bytes that are loaded when the stage moves."""
        return self.memory_bytes if self.weights_bytes is None else self.weights_bytes

    @property
    def efficiency(self) -> dict[int, float]:
        """Return the efficiency by each number of devices that the stage may have."""
        return {1: 1.0, **self.tensor_parallel}

    @field_validator("tensor_parallel")
    @classmethod
    def _efficiencies(cls, value: dict[int, float]) -> dict[int, float]:
        for degree, part in value.items():
            if degree < 2 or not 0 < part <= 1:
                raise ValueError(
                    f"option 'tensor_parallel' must give degrees of 2 or more an efficiency above 0 and at most 1, got "
                    f"{degree}: {part:g}; a degree of 1 always has the efficiency 1"
                )
        return value

    @model_validator(mode="after")
    def _weights_within_memory(self) -> "ProfileOptions":
        if self.loaded_bytes > self.memory_bytes:
            raise ValueError(
                f"option 'weights_bytes' must not be above 'memory_bytes': {self.weights_bytes} > {self.memory_bytes}; "
                "the memory includes the weights"
            )
        return self


class PartitionOptions(Options):
    """Options of placing stages on devices."""

    enabled: bool = Field(False, description="Decide which stages share a device, and decide again under pressure.")
    min_gain: float = Field(
        0.1, ge=0, description="Least relative gain of throughput for which a plan changes; 0.1 is a tenth."
    )
    cooldown_seconds: float = Field(60.0, ge=0, description="Least time between two changes.")
    devices: dict[str, DeviceOptions] = Field(
        default_factory=dict,
        description="Devices that may be used, by their id in vLLM-Omni's `devices`. A stage is split only over "
        "devices that follow each other here.",
    )

    profiles: dict[str, ProfileOptions] = Field(
        default_factory=dict, description="Needs of stages, by name or id; other stages are measured."
    )
    payload_bytes: dict[str, Annotated[FractionalBytes, Field(ge=0)]] = Field(
        default_factory=dict,
        description="Bytes of a request that a stage sends to another one, by edges such as `thinker->talker`, of "
        "names or ids. Edges that are not named cost nothing.",
    )
    link_bytes_per_second: FractionalBytes | None = Field(
        None,
        gt=0,
        description="Speed of payloads from one device to another, for devices that `links` does not name; null: they "
        "take no time.",
    )
    links: dict[str, Annotated[FractionalBytes, Field(gt=0)]] = Field(
        default_factory=dict,
        description="Speed of payloads in bytes per second by device and device, such as `0->1`. A direction that is "
        "not named is as fast as the other one.",
    )
    load_bytes_per_second: FractionalBytes | None = Field(
        None, gt=0, description="Speed at which a stage that moves loads its weights; null: moves cost nothing."
    )
    horizon_seconds: float = Field(
        600.0,
        gt=0,
        description="Time within which the gain of a plan must pay for its moves: it must answer more requests than "
        "are lost if none is answered while weights are loaded.",
    )

    def profile_of(self, stage_id: int, name: str = "") -> ProfileOptions | None:
        return self.profiles.get(str(stage_id)) or self.profiles.get(name)

    def payloads(self, stage_names: Mapping[int, str]) -> dict[tuple[int, int], float]:
        """Return the payload bytes of edges by the ids of their stages; edges of unknown stages are left out."""
        ids = {name: stage_id for stage_id, name in stage_names.items()} | {str(one): one for one in stage_names}
        found = {}
        for edge, nbytes in self.payload_bytes.items():
            source, target = _ends(edge)
            if source in ids and target in ids:
                found[ids[source], ids[target]] = nbytes
        return found

    @property
    def link_speeds(self) -> dict[tuple[str, str], float]:
        """Return the speed of links in both directions, by the devices from and to."""
        given = {_ends(key): speed for key, speed in self.links.items()}
        return {(to, begin): speed for (begin, to), speed in given.items()} | given

    @field_validator("devices", "profiles", mode="before")
    @classmethod
    def _ids(cls, value: Any) -> Any:
        return keys_as_text(value)

    @field_validator("payload_bytes", "links")
    @classmethod
    def _two_ends(cls, value: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        example = "thinker->talker" if info.field_name == "payload_bytes" else "0->1"
        for key in value:
            source, target = _ends(key)
            if not source or not target or source == target:
                raise ValueError(f"option '{info.field_name}.{key}' must name two ends, such as '{example}'")
        return value

    @model_validator(mode="after")
    def _has_devices(self) -> "PartitionOptions":
        if self.enabled and not self.devices:
            raise ValueError("option 'devices' must name the devices that stages may be placed on, with 'memory_bytes'")
        for key in self.devices:
            if "," in key:
                raise ValueError(
                    f"option 'devices.{key}' must be the id of one device, without a comma: name each alone"
                )
        for key in self.links:
            for end in _ends(key):
                if end not in self.devices:
                    known = ", ".join(self.devices) or "none"
                    raise ValueError(f"option 'links.{key}': there is no device {end!r} in 'devices'; it has {known}")
        return self


def _ends(edge: str) -> tuple[str, str]:
    """Return the two ends of an edge such as ``a->b``; empty ones if it is not of that form."""
    source, _, target = edge.partition("->")
    return source.strip(), target.strip()


class GraphOptions(Options):
    """Options of merging, order, affinity and placement of work."""

    merging: MergingOptions = Field(MergingOptions(), description="Merging of identical work of several requests.")
    priority: PriorityOptions = Field(PriorityOptions(), description="The order of requests along their path.")
    affinity: AffinityOptions = Field(AffinityOptions(), description="Sending requests where their data is.")
    partition: PartitionOptions = Field(PartitionOptions(), description="Placement of stages on devices.")
