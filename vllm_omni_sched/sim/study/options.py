"""Define the options of a study file."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.sim.scenario.loader import flatten


class _Choices(Options):
    """Values, and choices between values."""

    set: dict[str, Any] = Field(default_factory=dict, description="Values by dotted keys.")
    choices: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Values to choose from, by dotted key; `[tune]` chooses the best. Where the values are tables, "
        "each sets all its keys, and the choice has a name of its own.",
    )

    @field_validator("choices", mode="before")
    @classmethod
    def _dotted(cls, value: Any) -> Any:
        return flatten(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _something_to_choose(self) -> "_Choices":
        for key, values in self.choices.items():
            if not values:
                raise ValueError(f"'choices.{key}' has no values: give some, or remove it")
        return self


class Variant(_Choices):
    """One variant of the scenario."""

    name: str = Field(min_length=1, description="Name in tables and plots.")


class Case(Options):
    """A situation in which every variant runs."""

    name: str = Field(min_length=1, description="Name in tables and plots, before the variant's name.")
    set: dict[str, Any] = Field(default_factory=dict, description="Values by dotted keys, for all variants.")
    variants: dict[str, _Choices] = Field(
        default_factory=dict, description="Further values and choices of a variant in this case, by its name."
    )


class Tune(Options):
    """Search for the best of a variant's `choices`. Every variant with choices gets the same search."""

    trials: int = Field(24, ge=1, le=10_000, description="Combinations tried for each variant in each case.")
    finalists: int = Field(4, ge=1, le=1000, description="Best combinations, which are tried again with more requests.")
    seeds: int = Field(1, ge=1, le=100, description="Training seeds of each trial; never reported seeds.")
    final_seeds: int = Field(2, ge=1, le=100, description="Training seeds of the finalists.")
    trial: dict[str, Any] = Field(default_factory=dict, description="Values by dotted keys, for trials.")
    final: dict[str, Any] = Field(default_factory=dict, description="Values by dotted keys, for the finalists.")
    precision: float = Field(0.25, gt=0, lt=1, description="Relative precision of the searches in trials.")


class Search(Options):
    """Search for a number, instead of the results of one run."""

    kind: Literal["max_rate", "tightest_slo", "throughput"] = Field(
        description="`max_rate`: the largest rate that meets the SLO. `tightest_slo`: the smallest factor on its times "
        "that is still met. `throughput`: output per second when more arrives than can be served."
    )
    key: str = Field("workload.rate", min_length=1, description="Key that `max_rate` and `throughput` raise.")
    start: float | None = Field(None, gt=0, description="First value tried by `max_rate`; default: the scenario's.")
    precision: float = Field(0.05, gt=0, lt=1, description="Relative precision of the answer.")
    step: float = Field(2.0, gt=1, description="Factor of `max_rate` until one value holds and one fails.")
    doublings: int = Field(12, ge=1, le=40, description="Most such steps of `max_rate`.")
    factor: float = Field(10.0, gt=1, description="Factor of `throughput` on the rate.")
    load: float = Field(
        1.0, gt=0, description="Fraction of the scenario's rate at which `tightest_slo` loads the system."
    )


class StudyOptions(Options):
    """Options of a study, besides those of the scenario."""

    variants: tuple[Variant, ...] = Field(
        (), strict=False, description="Variants of the scenario; absent: the scenario itself."
    )
    cases: tuple[Case, ...] = Field((), strict=False, description="Situations; each variant runs in each of them.")
    tune: Tune = Field(Tune.model_construct(), description="How the best of `choices` is found.")
    sweep: dict[str, list[Any]] = Field(
        default_factory=dict, description="Values to run, by dotted key; all combinations of several keys."
    )
    search: Search | None = Field(None, description="Search at each point.")
    repeats: int = Field(1, ge=1, le=1000, description="Seeds: the scenario's, and those that follow.")

    @field_validator("sweep", mode="before")
    @classmethod
    def _dotted(cls, value: Any) -> Any:
        return flatten(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _different(self) -> "StudyOptions":
        for key, entries in (("variants", self.variants), ("cases", self.cases)):
            names = [entry.name for entry in entries]
            for name in dict.fromkeys(name for name in names if names.count(name) > 1):
                raise ValueError(f"'{key}.{name}' is given twice: names of {key} must differ")
        known = [variant.name for variant in self.variants]
        for case in self.cases:
            for name in case.variants:
                if name not in known:
                    raise ValueError(f"'cases.{case.name}.variants.{name}': there is no such variant; known: {known}")
        for key, values in self.sweep.items():
            if not values:
                raise ValueError(f"'sweep.{key}' has no values: give some, or remove it")
        return self

    def all_variants(self) -> tuple[Variant, ...]:
        """Return the variants of the file in each case; without any, one without a name.

        A variant in a case is named `CASE: VARIANT`. It has the case's values first, then its own, then those for
        this case alone; choices of the case come first.
        """
        variants = self.variants or (Variant.model_construct(name=""),)
        if not self.cases:
            return variants
        return tuple(_in_case(variant, case) for case in self.cases for variant in variants)


def _in_case(variant: Variant, case: Case) -> Variant:
    here = case.variants.get(variant.name, _Choices())
    return Variant.model_construct(
        name=f"{case.name}: {variant.name}" if variant.name else case.name,
        set={**flatten(case.set), **flatten(variant.set), **flatten(here.set)},
        choices={**here.choices, **variant.choices},
    )
