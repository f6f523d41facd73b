"""Define, read and write the calibration file, version 1, the result of ``vllm-omni-sched calibrate``."""

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.nearest import did_you_mean

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
