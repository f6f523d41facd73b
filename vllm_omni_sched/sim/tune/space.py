"""Define the options that are searched, and their bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Options = dict[str, Any]
"""Options as under ``omni_sched`` in vLLM's ``--additional-config``, and flags of vLLM, whose names begin with ``--``;
missing ones have their defaults."""

TOKENS, SEQUENCES = "--max-num-batched-tokens", "--max-num-seqs"
_TOKENS, _SEQUENCES = (256, 512, 1024, 2048, 4096, 8192), (8, 16, 32, 64, 128, 256)


def flags_of(options: Options) -> Options:
    """Return the flags of vLLM among the options."""
    return {name: value for name, value in options.items() if name.startswith("--")}


def policy_of(options: Options) -> Options:
    """Return the options of the scheduler among the options."""
    return {name: value for name, value in options.items() if not name.startswith("--")}


def command_line(flags: Options) -> str:
    """Return flags as they are given to ``vllm serve``."""
    return " ".join(f"{name} {value}" for name, value in flags.items())


class Trial(Protocol):
    """Proposes values; a trial of Optuna."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Propose one of the choices."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """Propose a number between the bounds."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        """Propose a whole number between the bounds."""


@dataclass(frozen=True)
class Parameter:
    """An option that is one of ``values``, or a number between ``low`` and ``high`` (whole with ``whole``).

    ``when``: it is only searched if one of these options has one of these values.
    """

    name: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    when: Mapping[str, tuple[Any, ...]] | None = None

    def asked(self, options: Options) -> bool:
        """Return whether it has an effect beside those options."""
        return self.when is None or any(options.get(name) in values for name, values in self.when.items())

    def suggest(self, trial: Trial) -> Any:
        """Return a proposed value; numbers are rounded to three digits for readability."""
        if self.values:
            return trial.suggest_categorical(self.name, self.values)
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=True)
        return float(f"{trial.suggest_float(self.name, self.low, self.high, log=True):.3g}")


_STEERED = ("pid", "adaptive")


def space(itl_seconds: float, encodes: bool = True, max_num_seqs: int = 256) -> list[Parameter]:
    """Return the parameters that are searched for an engine.

    Args:
        itl_seconds: ITL target of the SLO; targets lie between a fifth of it and all of it.
        encodes: the engine has the encoder.
    """
    low, high = 200 * itl_seconds, 1000 * itl_seconds
    found = [
        Parameter("prefill_control", ("off", *_STEERED)),
        Parameter("batch_control", ("off", "pid")),
        Parameter(
            "control_target_ms", low=low, high=high, when={"prefill_control": _STEERED, "batch_control": _STEERED}
        ),
        Parameter(
            "batch_max", low=min(8, max_num_seqs), high=max_num_seqs, whole=True, when={"batch_control": _STEERED}
        ),
        Parameter("waiting_order", ("arrival", "sla")),
        Parameter("pieces", (False, True)),
    ]
    if encodes:
        ahead = {"encode_ahead": (True,)}
        found += [
            Parameter("encode_ahead", (False, True)),
            Parameter("encode_lane_min_share", low=0.05, high=0.6, when=ahead),
            Parameter("encode_rounds", (False, True), when={"encode_ahead": (False,)}),
            Parameter("itl_target_ms", low=low, high=high, when=ahead),
        ]
    return found


def flag_values(name: str, max_num_seqs: int) -> tuple[int, ...]:
    """Return the values of a flag that are tried; more sequences than the server may run now are not."""
    return _TOKENS if name == TOKENS else tuple(value for value in _SEQUENCES if value <= max_num_seqs)


def suggest(parameters: Sequence[Parameter], trial: Trial) -> Options:
    """Return the options of one trial, without those that have no effect."""
    options: Options = {}
    for parameter in parameters:
        if parameter.asked(options):
            options[parameter.name] = parameter.suggest(trial)
    return options
