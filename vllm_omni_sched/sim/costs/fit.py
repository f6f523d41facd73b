"""Fit the costs of an engine to measured times."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.config.errors import ConfigError

STEP_COSTS = (
    "base_seconds", "per_decode", "per_context_token", "per_prefill_token", "per_prefill_pair", "prefill_seconds"
)  # fmt: skip
_TIMES, _SAME = 20, 0.01  # for `median_fit`: repetitions; errors below that count alike
_PARTS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)


class StepPoint(NamedTuple):
    """Total time and work of ``steps`` consecutive steps. Tokens; pairs of a query and a key."""

    decodes: int
    context_tokens: int
    prefill_tokens: int
    prefill_pairs: float
    seconds: float
    steps: int = 1


class EncodePoint(NamedTuple):
    """Time to encode items of one request together, ``embeds`` embeddings in all."""

    modality: str
    items: int
    embeds: int
    seconds: float


class FrontPoint(NamedTuple):
    """Time from a client's call until the engine core has the request. ``text_tokens``: besides those of the items."""

    text_tokens: int
    modality: str
    items: int
    seconds: float


class ServedFirst(NamedTuple):
    """Time from a client's call of a server to the first token, alone. ``prompt_tokens``: with those of the items."""

    prompt_tokens: int
    modality: str
    items: int
    seconds: float


class ServedAnswers(NamedTuple):
    """A load of a server: so many requests have answers of ``steps`` tokens at once.

    ``outputs``: events that all clients got. ``cpu_seconds``: of the API server.
    """

    requests: int
    steps: int
    outputs: int
    cpu_seconds: float


class ServedRequest(NamedTuple):
    """A request beside others: when it was sent, since the load began, and the time until its last token.

    ``prompt_tokens``: with those of the items.
    """

    at: float
    prompt_tokens: int
    modality: str
    items: int
    output_tokens: int
    seconds: float


@dataclass
class ServerStart:
    """Holds what clients saw of one start of a server.

    ``steps``: with a prompt, as the other requests see it; prompts that are computed alone are in ``firsts``.
    ``steadiness``: each gap of the decode loads, relative to the median of those around it. ``mixed``: the requests of
    each load of all kinds at once.
    """

    steps: list[StepPoint] = field(default_factory=list)
    firsts: list[ServedFirst] = field(default_factory=list)
    steadiness: list[float] = field(default_factory=list)
    answers: list[ServedAnswers] = field(default_factory=list)
    mixed: list[list[ServedRequest]] = field(default_factory=list)


@dataclass
class Observations:
    """Holds all measurements of one engine, in order.

    ``steadiness``: each step of the decode loads, relative to the median of those around it. ``answers``: seconds
    from the end of a step until the client has its tokens. ``lane_slowdowns``: of steps while a lane encodes, relative
    to the same steps without. ``front_stalls``: seconds by which a client's token was late because the front end
    processed an item, by modality. ``starts``: of the same engine behind its API server, what clients saw over HTTP,
    for each start of the server; empty if no server was measured. ``lane_starts``: the same with encode-ahead.
    """

    steps: list[StepPoint] = field(default_factory=list)
    steadiness: list[float] = field(default_factory=list)
    encodes: list[EncodePoint] = field(default_factory=list)
    lane_encodes: list[EncodePoint] = field(default_factory=list)
    lane_slowdowns: list[float] = field(default_factory=list)
    fronts: list[FrontPoint] = field(default_factory=list)
    front_stalls: dict[str, list[float]] = field(default_factory=dict)
    answers: list[float] = field(default_factory=list)
    starts: list[ServerStart] = field(default_factory=list)
    lane_starts: list[ServerStart] = field(default_factory=list)


def fit(seen: Observations) -> dict[str, Any]:
    """Return the fitted part of a calibration file (see `calibration_file.write`), and the quality of the fit.

    1. Repeated points count as their median; half of the steps take longer than the fit.
    2. Every cost is 0 or more, and errors are relative (Lawson and Hanson, 1974, chapter 23).
    3. Items that all have the same size do not determine a cost per item: it is assigned to the embeddings.
    4. Behind a server (`_served`), a step takes longer by what its API server takes from the engine's cores.
    5. Starts of a server differ: costs are those of the median start, load by load, and ``starts`` tells how far the
       others are from it (`_spread`).

    Raises:
        ConfigError: a required kind of point is missing.
    """
    if not seen.steps or not seen.fronts or not seen.answers:
        raise ConfigError("a calibration needs measured steps, front-end times and answers; one of them is missing")
    points = _medians(seen.steps, key=lambda p: p._replace(seconds=0.0))
    rows = [_amounts(p) for p in points]
    step = dict(zip(STEP_COSTS, median_fit(rows, [p.seconds for p in points]), strict=True))
    off = [step_seconds(step, p) / p.seconds for p in points]
    found: dict[str, Any] = {
        "step": step,
        "encode": _encodes(seen.encodes),
        "encode_in_lane": _encodes(seen.lane_encodes) or None,
        "lane_slowdown": statistics.median(seen.lane_slowdowns) if seen.lane_slowdowns else 1.0,
        "frontend": _front(_medians(seen.fronts, key=lambda p: p._replace(seconds=0.0)), relative_fit),
        "front_stall": {name: statistics.median(stalls) for name, stalls in seen.front_stalls.items() if stalls},
        "answer_seconds": statistics.median(seen.answers),
        "residuals": {
            "points": len(points),
            "predicted_by_measured": {"min": min(off), "median": statistics.median(off), "max": max(off)},
        },
    }
    steadiness = [one for start in seen.starts for one in start.steadiness] or seen.steadiness
    if all(any(getattr(start, kind) for start in seen.starts) for kind in ("steps", "firsts", "answers")):
        _served(found, seen)
    if steadiness:
        values = np.quantile(steadiness, _PARTS)
        found["step"]["steadiness"] = [[part, float(value)] for part, value in zip(_PARTS, values, strict=True)]
    return found


def _served(found: dict[str, Any], seen: Observations) -> None:
    """Change fitted costs to those behind an API server.

    1. Steps: the constant and the costs of each decoding request and of each token that it reads are those that clients
       see. So are the costs of a prompt and of each of its tokens: beside decoding requests, it delays them also by the
       work of the API server.
    2. For a request, the front end has what the first token takes beyond its step, its encodes and the answer. The
       error is relative to the whole time: what is left of it is a small difference of large times.
    3. For outputs, it has the processor time of the API server beyond that of the requests themselves.
    4. In a server that encodes ahead, the constant of a step differs (`_with_lane`).
    """
    step = found["step"]
    steps = _median_start([start.steps for start in seen.starts])
    _fit_again(
        step, ("base_seconds", "per_decode", "per_context_token"), [one for one in steps if not one.prefill_tokens]
    )
    _fit_again(step, ("prefill_seconds", "per_prefill_token"), [one for one in steps if one.prefill_tokens])
    differ = _with_lane(seen)
    if differ is not None:
        step["with_lane"] = max(differ, -step["base_seconds"])
    firsts = [first for start in seen.starts for first in start.firsts]
    known = [_without_front(found, first) for first in firsts]
    fronts = [FrontPoint(0 if p.items else p.prompt_tokens, p.modality, p.items, p.seconds) for p in firsts]
    answers = [one for start in seen.starts for one in start.answers]
    _, per_step, per_output = relative_fit(
        [(one.requests, one.steps, one.outputs) for one in answers],
        [max(one.cpu_seconds, 1e-3) for one in answers],
    )
    found["frontend"] = {**_front(fronts, median_fit, known), "per_step": per_step, "per_output": per_output}
    found["starts"] = {
        "server": _spread(found, seen.starts),
        **({"with_lane": _spread(found, seen.lane_starts, step["with_lane"])} if "with_lane" in step else {}),
    }


def _with_lane(seen: Observations) -> float | None:
    """Return by how many seconds steps of a server that encodes ahead are longer, as clients see them.

    Each of its starts is compared with the one of the other server that was measured just before, load by load: a
    machine that is slower for a while is so for both. It is the median of the starts; None if none was measured.
    """
    found = []
    for ahead, other in zip(seen.lane_starts, seen.starts, strict=False):
        usual = {_work(one): one.seconds for one in _medians(other.steps, key=_work)}
        loads = [one for one in _medians(ahead.steps, key=_work) if not one.prefill_tokens and _work(one) in usual]
        if loads:
            found.append(statistics.median(one.seconds - usual[_work(one)] for one in loads))
    return statistics.median(found) if found else None


def _work(point: StepPoint) -> StepPoint:
    """Return what a point measures, without its seconds."""
    return point._replace(seconds=0.0)


def _fit_again(step: dict[str, float], names: Sequence[str], points: Sequence[StepPoint]) -> None:
    """Fit these costs of a step to these points, and leave the others; change nothing if the points are all alike."""
    of = [dict(zip(STEP_COSTS, _amounts(point), strict=True)) for point in points]
    rows = [[amounts[name] for name in names] for amounts in of]
    if len({tuple(row) for row in rows}) < len(names):
        return
    step.update(dict.fromkeys(names, 0.0))
    known = [step_seconds(step, point) for point in points]
    step.update(zip(names, median_fit(rows, [point.seconds for point in points], known), strict=True))


def _without_front(found: dict[str, Any], first: ServedFirst) -> float:
    """Return the seconds of a first token by the fitted costs, without the front end."""
    prompt = StepPoint(0, 0, first.prompt_tokens, prefill_pairs(0, first.prompt_tokens), 0.0)
    seconds = step_seconds(found["step"], prompt) + found["answer_seconds"]
    if first.items:
        encode = found["encode"][first.modality]
        seconds += encode["base_seconds"] + encode["per_item"] * first.items + encode["per_embed"] * first.prompt_tokens
    return float(seconds)


def step_seconds(step: dict[str, float], point: StepPoint) -> float:
    """Return the seconds of a point by the fitted costs."""
    return sum(step[name] * amount for name, amount in zip(STEP_COSTS, _amounts(point), strict=True))


def _amounts(p: StepPoint) -> tuple[float, ...]:
    return p.steps, p.decodes, p.context_tokens, p.prefill_tokens, p.prefill_pairs, p.steps if p.prefill_tokens else 0


def prefill_pairs(start: int, tokens: int) -> float:
    """Return the pairs of a query and a key when so many tokens of a prompt are computed behind ``start`` others."""
    return tokens * (start + tokens / 2)


def relative_fit(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    known: Sequence[float] | None = None,
    counts: Sequence[float] | None = None,
) -> list[float]:
    """Return weights >= 0 of the columns of ``rows`` with the least sum of squared relative errors; all values are > 0.

    Args:
        known: part of each value that needs no weight; None: 0 each.
        counts: weight of each squared error; None: 1 each.
    """
    y = np.asarray(values, dtype=float)
    left = 1.0 - (np.zeros(len(y)) if known is None else np.asarray(known, dtype=float)) / y
    counted = np.ones(len(y)) if counts is None else np.sqrt(np.asarray(counts, dtype=float))
    a = np.asarray(rows, dtype=float) * (counted / y)[:, None]
    scale = np.sqrt((a * a).sum(axis=0))
    scale[scale == 0] = 1.0
    return [float(weight) for weight in _nonnegative(a / scale, counted * left) / scale]


def median_fit(
    rows: Sequence[Sequence[float]], values: Sequence[float], known: Sequence[float] | None = None
) -> list[float]:
    """Return weights as in `relative_fit`, but with the least sum of absolute relative errors, robust to outliers.

    Repeated least squares, in which each error is weighted by the inverse of its size (Schlossmacher, JASA 1973).
    """
    found = relative_fit(rows, values, known)
    for _ in range(_TIMES):
        fitted = np.asarray(rows, dtype=float) @ np.asarray(found)
        if known is not None:
            fitted = fitted + np.asarray(known)
        off = np.abs(fitted / np.asarray(values) - 1)
        found = relative_fit(rows, values, known, (1 / np.maximum(off, _SAME)).tolist())
    return found


def _nonnegative(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Solve non-negative least squares with Lawson and Hanson's active set."""
    columns = a.shape[1]
    x = np.zeros(columns)
    free = np.zeros(columns, dtype=bool)
    for _ in range(10 * columns):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -math.inf
        if free.all() or gradient.max() <= 1e-10:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(columns)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                break
            step = (x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)).min()
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = trial
    return x


def _medians(points: Sequence[Any], key: Any) -> list[Any]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for point in points:
        groups[key(point)].append(point)
    return [g[0]._replace(seconds=statistics.median(p.seconds for p in g)) for g in groups.values()]


def _median_start(starts: Sequence[Sequence[StepPoint]]) -> list[StepPoint]:
    """Return the points of all starts; those of equal work count as the median of the starts' medians."""
    return _medians([point for start in starts for point in _medians(start, key=_work)], key=_work)


def _spread(found: dict[str, Any], starts: Sequence[ServerStart], with_lane: float = 0.0) -> dict[str, list[float]]:
    """Return how many times as long as fitted the steps and first tokens of each start took, as medians over its loads.

    Args:
        with_lane: seconds by which its steps differ from the fitted ones.
    """
    step, front = found["step"], found["frontend"]
    times: dict[str, list[float]] = {"steps": [], "first_tokens": []}
    for start in starts:
        steps = [one for one in _medians(start.steps, key=_work) if not one.prefill_tokens]
        if steps:
            ratios = [one.seconds / (step_seconds(step, one) + with_lane) for one in steps]
            times["steps"].append(statistics.median(ratios))
        texts = [first for first in start.firsts if not first.items]
        if texts:
            ratios = [
                one.seconds / (_without_front(found, one) + with_lane + _front_seconds(front, one.prompt_tokens))
                for one in texts
            ]
            times["first_tokens"].append(statistics.median(ratios))
    return times


def _encodes(points: Sequence[EncodePoint]) -> dict[str, dict[str, float]]:
    found = {}
    for modality in sorted({p.modality for p in points}):
        own = _medians([p for p in points if p.modality == modality], key=lambda p: p._replace(seconds=0.0))
        sizes = {p.embeds / p.items for p in own}
        rows = [(1.0, p.items if len(sizes) > 1 else 0.0, p.embeds) for p in own]
        costs = relative_fit(rows, [max(p.seconds, 1e-6) for p in own])
        found[modality] = dict(zip(("base_seconds", "per_item", "per_embed"), costs, strict=True))
    return found


def _front(
    points: Sequence[FrontPoint],
    fitted: Callable[[Sequence[Sequence[float]], Sequence[float], Sequence[float]], list[float]],
    known: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the costs of the front end for a request, each of its text tokens, and each item by modality.

    Args:
        fitted: `relative_fit` or `median_fit`, for requests without items.
        known: seconds of each point that are not the front end's; none: 0 each.
    """
    beside = list(zip(points, known or [0.0] * len(points), strict=True))
    texts = [(p, seconds) for p, seconds in beside if not p.items]
    rows = [(1.0, p.text_tokens) for p, _ in texts]
    per_request, per_token = fitted(rows, [p.seconds for p, _ in texts], [seconds for _, seconds in texts])
    front: dict[str, Any] = {"per_request": per_request, "per_text_token": per_token, "per_item": {}}
    for modality in sorted({p.modality for p in points if p.items}):
        own = [(p, seconds) for p, seconds in beside if p.items and p.modality == modality]
        beyond = [(p.seconds - seconds - _front_seconds(front, p.text_tokens)) / p.items for p, seconds in own]
        front["per_item"][modality] = max(statistics.median(beyond), 0.0)
    return front


def _front_seconds(front: dict[str, Any], text_tokens: int) -> float:
    """Return the seconds of the front end for a request without its items."""
    return float(front["per_request"] + front["per_text_token"] * text_tokens)
