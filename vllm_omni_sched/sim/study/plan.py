"""Make the points of a study, each checked before any runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.scenario.explain import explain_problem
from vllm_omni_sched.sim.scenario.loader import (
    STUDY_KEYS,
    Source,
    apply,
    flatten,
    merged,
    read_source,
    within,
)
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.study.options import Search, StudyOptions, Tune


@dataclass(frozen=True)
class Point:
    """One variant at one value of each swept key, with one seed.

    ``overrides``: values of the point, applied to the source; ``values``: of the swept keys. ``choices``: by name, the
    values to
    choose from: of a dotted key, or tables of several. ``start``: where `max_rate` begins, instead of the study's.
    ``given``: values of the caller, which no choice and no swept key replaces.
    """

    variant: str
    values: Mapping[str, Any]
    seed: int
    overrides: Mapping[str, Any]
    source: Source
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    start: float | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the label that distinguishes it from other points, such as `stock, workload.rate 4`."""
        return self.without_seed or f"seed {self.seed}"

    @property
    def without_seed(self) -> str:
        """Return the label of all points that differ by their seed alone; "" if there is nothing to distinguish."""
        parts = [self.variant] if self.variant else []
        return ", ".join(parts + [f"{key} {value}" for key, value in self.values.items()])

    @property
    def without_choices(self) -> tuple[str, str]:
        """Return a key that is equal for all points that are tuned together, which differ by their seed alone."""
        return self.variant, repr(sorted(self.values.items()))

    def chosen(self, options: Mapping[str, Any], seed: int | None = None, start: float | None = None) -> "Point":
        """Return the point with a value for each of its choices.

        Swept keys and those of the caller keep their values.
        """
        overrides = merged(self.overrides, settings(options), self.values, self.given)
        if seed is not None:
            overrides["seed"] = seed
        return replace(
            self, seed=self.seed if seed is None else seed, overrides=overrides, choices={}, start=start or self.start
        )

    @property
    def first_choice(self) -> "Point":
        """Return the point with the first value of each choice."""
        return self.chosen({name: values[0] for name, values in self.choices.items()})

    def scenario(self, overrides: Mapping[str, Any] | None = None) -> Scenario:
        """Return the scenario of this point, with more overrides.

        Raises:
            ConfigError: the scenario is impossible.
        """
        return self.source.scenario(merged(self.overrides, flatten(overrides or {})), self.without_seed)


@dataclass(frozen=True)
class Study:
    """Points, and the search at each. ``base``: the scenario that all are made from.

    ``tune``: how points with choices are tuned. ``systems``: the names of variants if there are cases, else none.
    """

    base: Scenario
    source: Source
    points: tuple[Point, ...]
    search: Search | None
    repeats: int
    tune: Tune = field(default_factory=Tune)
    systems: tuple[str, ...] = ()

    @property
    def single(self) -> bool:
        """Return whether the study is one plain run."""
        return len(self.points) == 1 and self.search is None

    @property
    def changes(self) -> bool:
        """Return whether replicas are added or lost at any point."""
        runs = [point.scenario() for point in self.points]
        return any(run.failures or run.autoscale is not None for run in runs)


def load_study(path: Path, overrides: Mapping[str, Any] | None = None) -> Study:
    """Return the study of a TOML file; a file without study keys is one run.

    Args:
        overrides: values by dotted keys for all points, also of the study: ``{"search.precision": 0.1}``. They replace
            the same key of a variant, a case, the sweep or a choice; only the key of a search, and
            values of `[tune]` for its trials, replace them.

    Raises:
        ConfigError: the file, or one of the points, is impossible; the message names it.
    """
    flat = flatten(overrides or {})
    of_study = {key: value for key, value in flat.items() if key.split(".")[0] in STUDY_KEYS}
    source, raw = read_source(path)
    raw = apply(raw, of_study, path.name)
    try:
        options = StudyOptions.model_validate(raw)
    except ValidationError as error:
        message = "; ".join(explain_problem(one, StudyOptions, raw) for one in error.errors())
        raise ConfigError(f"{path.name}: {message}") from None
    common = {key: value for key, value in flat.items() if key not in of_study}
    base = source.scenario(common)
    points = tuple(_points(options, source, common))
    for point in points:
        _check(point, options.search)
    systems = tuple(variant.name for variant in options.variants) if options.cases else ()
    return Study(base, source, points, options.search, options.repeats, options.tune, systems)


def _points(options: StudyOptions, source: Source, common: Mapping[str, Any]) -> Iterator[Point]:
    keys = {key: [common[key]] if key in common else values for key, values in options.sweep.items()}
    given = {key: value for key, value in common.items() if key != "seed"}  # each point has its own seed
    for variant in options.all_variants():
        choices = _still_to_choose(variant.choices, common)
        for values in product(*keys.values()):
            swept = dict(zip(keys, values, strict=True))
            overrides = merged(flatten(variant.set), swept, common)
            point = Point(variant.name, swept, 0, overrides, source, choices, given=given)
            first = point.first_choice.scenario().seed
            for seed in range(first, first + options.repeats):
                yield replace(point, seed=seed, overrides={**overrides, "seed": seed})


def _still_to_choose(choices: Mapping[str, Sequence[Any]], given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the remaining choices when some keys are given; values that differ in these alone are merged."""
    left: dict[str, tuple[Any, ...]] = {}
    for name, values in choices.items():
        if not any(isinstance(value, Mapping) for value in values):
            if not within(name, given):
                left[name] = tuple(values)
            continue
        others: list[Any] = []
        for value in values:
            if isinstance(value, Mapping):
                value = {key: one for key, one in flatten(value).items() if not within(key, given)}
            if value not in others:
                others.append(value)
        if others != [{}]:
            left[name] = tuple(others)
    return left


def _check(point: Point, search: Search | None) -> None:
    """Check that the key of the search can be raised, and that each choice is possible.

    A value is checked with the first values of all other choices; an impossible combination of others is a failed
    trial.
    """
    first = {name: values[0] for name, values in point.choices.items()}
    for name, values in point.choices.items():
        for value in values[1:]:
            point.chosen(first | {name: value}).scenario()
    point = point.first_choice
    if search is None or search.kind == "tightest_slo":
        return
    if search.kind == "max_rate" and search.start is not None:
        point.scenario({search.key: search.start})
        return
    value = value_at(point, search.key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        hint = "set it, or 'search.start'" if search.kind == "max_rate" else "set it"
        raise ConfigError(f"{point.source.where}: 'search.key' is '{search.key}', which has no value above 0: {hint}")


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of choices: a table sets all its keys, another value the key that names its choice."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= flatten(value) if isinstance(value, Mapping) else {name: value}
    return found


def value_at(point: Point, key: str) -> Any:
    """Return the scenario's value at a dotted key; None if it has none."""
    at: Any = apply(point.source.raw, point.overrides, point.source.where)
    for part in key.split("."):
        if isinstance(at, list):
            at = {str(one.get("name", number)): one for number, one in enumerate(at)}
        at = at.get(part) if isinstance(at, dict) else None
    return at
