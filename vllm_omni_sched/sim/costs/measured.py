"""Compute an engine's seconds from a calibration, with or without the measured variation of its steps."""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.calibration import Calibration, EncodeCosts, read_calibration
from vllm_omni_sched.sim.work import Request


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
    def served(self) -> bool:
        """Return whether the engine was measured behind a server, as `calibrate --server` does."""
        return "server" in self.calibration.starts or self.has_output_costs

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
