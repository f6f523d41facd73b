"""Read and write learnt weights as a JSON file."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.learned import ARMS, FEATURES, LearnedPrefill, LinearPolicy, RewardGuard

FORMAT = "vllm-omni-sched learned prefill"
_SHIPPED = "learned_prefill.json"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str
    version: int = Field(ge=1, le=1)
    arms: tuple[float, ...]
    features: tuple[str, ...]
    penalty: float = Field(ge=0, allow_inf_nan=False)
    weights: tuple[tuple[float, ...], ...]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Learned:
    """Learnt weights, the penalty of the reward that they were trained on, and their provenance."""

    policy: LinearPolicy
    penalty: float
    provenance: dict[str, Any]

    def control(
        self,
        target_seconds: float,
        promise_seconds: float,
        interval_seconds: float,
        minimum: int,
        maximum: int,
    ) -> LearnedPrefill:
        """Return a controller that uses these weights, under a guard.

        The guard tolerates a reward that is worse by 15 % of the time and by one late step in a hundred.
        """
        return LearnedPrefill(
            self.policy,
            target_seconds,
            promise_seconds,
            interval_seconds,
            minimum,
            maximum,
            self.penalty,
            RewardGuard(margin=0.15 + 0.01 * self.penalty),
        )

    def as_json(self) -> str:
        """Return the content of a weights file."""
        body = _File(
            format=FORMAT,
            version=1,
            arms=ARMS,
            features=FEATURES,
            penalty=self.penalty,
            weights=tuple(tuple(round(value, 6) for value in row) for row in self.policy.weights),
            provenance=self.provenance,
        )
        return json.dumps(body.model_dump(mode="json"), indent=1) + "\n"


def read(text: str, where: str) -> Learned:
    """Parse the content of a weights file.

    Raises:
        ConfigError: it is not a weights file, or has other arms or features than this version.
    """
    try:
        body = _File.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {at + ': ' if at else ''}{first['msg']}; train it again") from None
    for name, found, wanted in (
        ("format", body.format, FORMAT),
        ("arms", body.arms, ARMS),
        ("features", body.features, FEATURES),
    ):
        if found != wanted:
            raise ConfigError(f"{where}: '{name}' is {found!r}, but this version needs {wanted!r}; train it again")
    return Learned(LinearPolicy(body.weights), body.penalty, body.provenance)


def shipped() -> Learned:
    """Return the weights that come with this package.

    Raises:
        ConfigError: as for `read`.
    """
    return read(files("vllm_omni_sched.resource").joinpath(_SHIPPED).read_text(encoding="utf-8"), _SHIPPED)
