"""Define, read and write the calibration file, version 1, the result of ``vllm-omni-sched calibrate``; and compute an
engine's seconds from it, with or without the measured variation of its steps.
"""

import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from random import Random  # noqa: TID251 (the type of an argument)
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.work import Request

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StepCosts(_Part):
    """Costs of a step: a constant, and the cost of each decoding request, each token that they read, the first prompt
    token that it computes, each such token and each of its pairs of a query and a key. ``steadiness``: pairs of a
    fraction p and a factor f, ordered by p: the fraction p of all steps takes at most f times the fitted time.
    ``beside``: seconds that a step takes longer, besides its part of the cores, while one other engine of the same host
    runs, two others, …; more count like the last. ``with_lane``: seconds that a step takes longer in a server whose
    engine encodes ahead, while it encodes nothing; less than 0 if it is shorter.
    """

    base_seconds: Seconds
    per_decode: Seconds
    per_context_token: Seconds
    per_prefill_token: Seconds
    per_prefill_pair: Seconds
    prefill_seconds: Seconds = 0.0
    steadiness: list[tuple[float, float]] | None = None
    beside: list[Seconds] = []
    with_lane: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class EncodeCosts(_Part):
    """Costs of a batch of items of one modality."""

    base_seconds: Seconds
    per_item: Seconds
    per_embed: Seconds


class FrontendCosts(_Part):
    """Costs of the front end for a request, and for the outputs of a step, in total and each. ``beside``: seconds that
    a request waits longer while one engine of the same host runs, two, …; more count like the last.
    """

    per_request: Seconds
    per_text_token: Seconds
    per_item: dict[str, Seconds] = {}
    per_step: Seconds = 0.0
    per_output: Seconds = 0.0
    beside: list[Seconds] = []


class StartTimes(_Part):
    """Holds how far each measured start of a server is from the costs: its times as multiples of what they say."""

    steps: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = []
    first_tokens: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = []


class Calibration(_Part):
    """Content of a calibration file. ``encode_in_lane``: None if no lane was measured. ``lane_slowdown``: how many
    times as long a step takes while the lane works with the whole device. ``front_stall``: by modality, the delay that
    an item in the front end adds to a token of another request. ``starts``: what single starts of the server took, and
    of the server with encode-ahead; a server that is started again may differ as much. ``under_load``: how many times
    as long as the costs everything takes while clients send requests of all kinds at once, to each of the two servers;
    what an engine costs is the product. ``residuals``: quality of the fit; not read.
    """

    format: Literal["vllm-omni-sched calibration"] = "vllm-omni-sched calibration"
    version: Literal[1]
    source: str | dict[str, Any]
    step: StepCosts
    encode: dict[str, EncodeCosts]
    encode_in_lane: dict[str, EncodeCosts] | None = None
    lane_slowdown: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    frontend: FrontendCosts
    front_stall: dict[str, Seconds] = {}
    answer_seconds: Seconds
    kv_tokens: Annotated[int, Field(ge=1)]
    starts: dict[Literal["server", "with_lane"], StartTimes] = {}
    under_load: dict[Literal["server", "with_lane"], Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    residuals: dict[str, Any] = {}

    def times(self, factor: float) -> "Calibration":
        """Return a copy with all costs times a factor."""
        names = ("step", "encode", "encode_in_lane", "frontend", "answer_seconds")
        return self.model_copy(update={name: _times(getattr(self, name), factor) for name in names})


def _times(costs: Any, factor: float) -> Any:
    if isinstance(costs, _Part):
        names = (name for name in type(costs).model_fields if name != "steadiness")
        return costs.model_copy(update={name: _times(getattr(costs, name), factor) for name in names})
    if isinstance(costs, dict):
        return {name: _times(one, factor) for name, one in costs.items()}
    if isinstance(costs, list):
        return [_times(one, factor) for one in costs]
    return None if costs is None else factor * costs


_PARTS: dict[str, type[BaseModel]] = {
    "step": StepCosts,
    "encode": EncodeCosts,
    "encode_in_lane": EncodeCosts,
    "frontend": FrontendCosts,
}


def read_calibration(path: Path) -> Calibration:
    """Return the content of a calibration file.

    Raises:
        ConfigError: it cannot be read, is not JSON, or a key is missing, unknown or wrong; the message names file and
            key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the calibration {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    try:
        return Calibration.model_validate_json(text)
    except ValidationError as error:
        problems = error.errors()
        if problems[0]["type"] == "json_invalid":
            raise ConfigError(f"{path}: not valid JSON: {problems[0]['ctx']['error']}") from None
        raise ConfigError(f"{path}: " + "; ".join(_explain(one) for one in problems)) from None


def _explain(problem: Any) -> str:
    """Return one sentence that describes a problem and the fix."""
    at = [str(part) for part in problem["loc"]]
    key = ".".join(at)
    if problem["type"] == "extra_forbidden":
        known = list((_PARTS[at[0]] if len(at) > 1 else Calibration).model_fields)
        hint = did_you_mean(at[-1], known) or f"known are {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    if problem["type"] == "missing":
        return f"key {key!r} is missing; write the file again with vllm-omni-sched calibrate"
    return f"key {key!r}: {problem['msg'].lower()}, got {json.dumps(problem['input'], default=str)}"


FORMAT = "vllm-omni-sched calibration"
VERSION = 1


def write_calibration(path: Path, source: dict[str, Any], costs: dict[str, Any], kv_tokens: int) -> None:
    """Write the file atomically: an existing file stays until the new one is complete.

    Args:
        source: source of the numbers: command, versions, processor, date, model.
        costs: as `fit.fit` returns them.
        kv_tokens: tokens that fit into the engine's KV cache.

    Raises:
        ConfigError: the file cannot be written.
    """
    body = {"format": FORMAT, "version": VERSION, "source": source, **costs, "kv_tokens": kv_tokens}
    draft = None
    try:
        number, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(number, "w") as file:
            file.write(json.dumps(body, indent=1) + "\n")
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError as error:
        if draft is not None:
            Path(draft).unlink(missing_ok=True)
        raise ConfigError(f"the calibration cannot be written to {path}: {error.strerror}") from None


class MeasuredCosts:
    """Costs of an engine from a calibration file.

    1. Each cost is a sum of counts times the file's costs.
    2. With a share of the device, LLM and encoder take 1 / share as long: the file has no data about sharing.
    3. While the lane works with the whole device, steps take ``lane_slowdown`` times as long; with a share of it, the
    slowdown is in proportion.
    4. In the lane, items cost what was measured there, at the whole device.
    5. All of them count as often as ``under_load`` of a server says, if a server was measured.

    ``where``: the file, for messages.
    """

    def __init__(self, calibration: Calibration, where: str = "calibration") -> None:
        self.calibration, self.where = calibration, where
        self.source = Source(SourceKind.MEASURED, _described(calibration.source, where) + _starts(calibration))
        self.kv_tokens = calibration.kv_tokens
        self._costs = calibration.times(calibration.under_load.get("server", 1.0))
        step = self._costs.step
        self._base, self._decode, self._context = step.base_seconds, step.per_decode, step.per_context_token
        self._prefill, self._pair, self._prompts = step.per_prefill_token, step.per_prefill_pair, step.prefill_seconds
        self._slower = max(calibration.lane_slowdown, 1.0) - 1.0

    def with_lane(self) -> "MeasuredCosts":
        """Return the costs of the same engine with encode-ahead, whose steps differ even while it encodes nothing."""
        step, loaded = self.calibration.step, self.calibration.under_load
        steps = step.model_copy(update={"base_seconds": step.base_seconds + step.with_lane, "with_lane": 0.0})
        update = {"step": steps, "under_load": {"server": loaded["with_lane"]} if "with_lane" in loaded else loaded}
        return MeasuredCosts(self.calibration.model_copy(update=update), self.where)

    @classmethod
    def read(cls, path: Path) -> "MeasuredCosts":
        """Return the costs in a calibration file.

        Raises:
            ConfigError: it cannot be read, or is not a calibration; the message names file and key.
        """
        return cls(read_calibration(path), str(path))

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        """Return the seconds of a step of the LLM; 0 if it has no token to compute."""
        if not decodes and not prefill_tokens:
            return 0.0
        return (
            self._base
            + self._decode * decodes
            + self._context * context_tokens
            + self._prefill * prefill_tokens
            + self._pair * prefill_pairs
            + (self._prompts if prefill_tokens else 0.0)
        ) / share

    def operations_seconds(self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float) -> None:
        """Return None: a calibration has times without their operations."""

    def encode_seconds(self, modality: str, embeds: int, items: int = 1, share: float = 1.0) -> float:
        """Return the seconds to encode so many items together in a step.

        Raises:
            ConfigError: the modality was not measured.
        """
        return self._sum("encode", self._costs.encode, modality, embeds, items) / share

    def lane_seconds(
        self, modality: str, embeds: int, items: int = 1, share: float = 1.0, beside: bool = False
    ) -> float:
        """Return the seconds to encode items in the encode-ahead lane, as measured beside steps.

        Raises:
            ConfigError: no lane was measured, or not with that modality.
        """
        lane = self._costs.encode_in_lane
        if lane is None:
            raise ConfigError(
                f"{self.where}: 'encode_in_lane' is null, no lane was measured; calibrate an engine with encode_ahead, "
                "or let the scenario encode in the step"
            )
        return self._sum("encode_in_lane", lane, modality, embeds, items) / share

    def in_lane(self, share: float) -> float:
        """Return the fraction that the LLM keeps, so that its steps are slowed down as measured."""
        return 1.0 / (1.0 + self._slower * share)

    def frontend_seconds(self, request: Request) -> float:
        """Return the seconds in the front end before the engine gets the request.

        Raises:
            ConfigError: the modality of an item was not measured.
        """
        front = self._costs.frontend
        seconds = front.per_request + front.per_text_token * request.text_tokens
        for item in request.items:
            each = front.per_item.get(item.modality)
            if each is None:
                raise self._not_measured("frontend.per_item", item.modality, list(front.per_item))
            seconds += each
        return seconds

    def beside_seconds(self) -> Sequence[float]:
        """Return the extra seconds of a step while one other engine of the host runs, two others, and so on."""
        return self._costs.step.beside

    def outputs_seconds(self, outputs: int) -> float:
        """Return the seconds of the front end for so many outputs of a step, before clients have them."""
        front = self._costs.frontend
        return front.per_step + front.per_output * outputs

    @property
    def has_output_costs(self) -> bool:
        """Return whether the outputs of a step cost the front end something, as was measured behind a server."""
        front = self.calibration.frontend
        return front.per_step > 0 or front.per_output > 0

    @property
    def answer_seconds(self) -> float:
        return self._costs.answer_seconds

    def _sum(self, key: str, costs: dict[str, EncodeCosts], modality: str, embeds: int, items: int) -> float:
        cost = costs.get(modality)
        if cost is None:
            raise self._not_measured(key, modality, list(costs))
        return cost.base_seconds + cost.per_item * items + cost.per_embed * embeds

    def _not_measured(self, key: str, modality: str, known: list[str]) -> ConfigError:
        has = ", ".join(sorted(known)) or "nothing"
        return ConfigError(f"{self.where}: {key!r} has {has}, but modality {modality!r} arrives: calibrate with it")


def _described(source: object, where: str) -> str:
    """Return the facts of a source that identify the machine."""
    if not isinstance(source, dict):
        return f"{source} ({where})"
    facts = [str(source[key]) for key in ("command", "model", "cpu", "gpu", "date") if source.get(key)]
    return ", ".join([*facts, where])


def _starts(calibration: Calibration) -> str:
    """Return how far single starts of the measured server are from its costs, or nothing with fewer than two starts."""
    found = []
    for of, times in calibration.starts.items():
        for name, factors in (("steps", times.steps), ("first tokens", times.first_tokens)):
            if len(factors) > 1:
                least, most = (f"{factor - 1:+.0%}" for factor in (min(factors), max(factors)))
                found.append(f"{name}{' with encode-ahead' if of == 'with_lane' else ''} {least} to {most}")
    return f"; single starts of the server: {', '.join(found)}" if found else ""


class UnsteadyCosts(MeasuredCosts):
    """Measured costs whose step times are drawn at random around the fit.

    1. A step takes the fitted time, times a factor.
    2. The factor is drawn independently for each step from the calibration's ``steadiness``, with linear interpolation
    between its entries. It was measured for steps that only decode: a step that takes as long as several of those has
    the mean of as many factors, because what delays them is short.
    3. Encodes, the front end and answers take the fitted time: they are long, or hardly affect a gap.

    Args:
        costs: of a file that has ``steadiness``; without it, steps take the fitted time.
        rng: generator of the factors.
    """

    def __init__(self, costs: MeasuredCosts, rng: Random) -> None:
        super().__init__(costs.calibration, costs.where)
        table: Sequence[tuple[float, float]] = costs.calibration.step.steadiness or ((0.0, 1.0), (1.0, 1.0))
        self._parts = [part for part, _ in table]
        self._factors = [factor for _, factor in table]
        self._rng = rng
        self._usual = self._base + self._decode

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        """Return the seconds of a step of the LLM; 0 if it has no token to compute."""
        steady = super().step_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs, share)
        if not steady:
            return 0.0
        times = max(round(steady / self._usual), 1) if self._usual else 1
        return steady * sum([self.factor(self._rng.random()) for _ in range(times)]) / times

    def beside_seconds(self) -> Sequence[float]:
        """Return the extra seconds beside other engines, times a factor drawn once for each step."""
        factor = self.factor(self._rng.random())
        return [seconds * factor for seconds in super().beside_seconds()]

    def factor(self, part: float) -> float:
        """Return the factor that this fraction of all steps does not exceed."""
        at = bisect_right(self._parts, part)
        if at == 0:
            return self._factors[0]
        if at == len(self._parts):
            return self._factors[-1]
        low, high = self._parts[at - 1], self._parts[at]
        return self._factors[at - 1] + (self._factors[at] - self._factors[at - 1]) * (part - low) / (high - low)
