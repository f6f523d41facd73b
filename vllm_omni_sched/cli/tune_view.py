"""What `tune` says: progress, a table, a sentence, YAML."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from vllm_omni_sched.sim.tune.gain import Comparison
    from vllm_omni_sched.sim.tune.search import Search, Tried
    from vllm_omni_sched.sim.tune.space import Options


class Bar:
    """Progress, on stderr."""

    def __init__(self, what: str, total: int, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[said]}"), console=Console(stderr=True),
                                  transient=True, disable=quiet)  # fmt: skip
        self._task = self._progress.add_task(what, total=total, said="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def at(self, done: int, said: str) -> None:
        self._progress.update(self._task, completed=done, said=said)


def verdict(found: Search, compared: Comparison | None) -> str:
    """What was found, in a sentence or three."""
    said = f"Interrupted after {found.trials} trials. " if found.interrupted else ""
    if compared is None:
        return said + "Interrupted before the held-out seeds were through: the gain is not known."
    default = _within([run.attainment for run in compared.default])
    proposed = compared.proposed
    if proposed is None:
        return f"{said}No option is known to help: {default} of the requests are within the SLO with the default."
    gain = proposed.attainment
    return (
        f"{said}Expected: {_within([run.attainment for run in proposed.runs])} of the requests within the SLO, instead "
        f"of {default}: {100 * gain.mean:+.1f} points, 95 % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}, "
        f"over {len(compared.seeds)} held-out seeds, for all that were compared together. P99 "
        f"TTFT: {_mean([run.ttft_p99 for run in proposed.runs]):.2f} s, instead of "
        f"{_mean([run.ttft_p99 for run in compared.default]):.2f} s."
    )


def proposal(fixed: Options, best: Tried, compared: Comparison | None) -> Options:
    """The options to set: none where none is known to help; the best so far where that was not found out."""
    if compared is None:
        return fixed | best.options
    return {} if compared.proposed is None else fixed | compared.proposed.options


def screen(what: str, said: str, options: Options, found: Search, compared: Comparison | None) -> Group:
    """All of it."""
    table = Table(title=what, title_justify="left", title_style="bold")
    for name in ("options", "within SLO", "gain, points", "P99 TTFT, s"):
        table.add_column(name, justify="left" if name == "options" else "right")
    if compared is None:
        for tried in found.tried[:3]:
            table.add_row(_shown(tried.options), f"{tried.attainment:.1%}", "not known", "")
    else:
        runs = compared.default
        table.add_row(
            "default", _within([one.attainment for one in runs]), "", f"{_mean([one.ttft_p99 for one in runs]):.2f}"
        )
        for one in compared.compared:
            gain = one.attainment
            table.add_row(
                _shown(one.options),
                _within([run.attainment for run in one.runs]),
                f"{100 * gain.mean:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]",
                f"{_mean([run.ttft_p99 for run in one.runs]):.2f}",
            )
    parts: list[Any] = [table, "", said + " Simulated: confirm it on the real engine."]
    if options:
        parts += ["", as_yaml(options)]
    return Group(*parts)


def as_yaml(options: Options, what: str = "", said: str = "") -> str:
    """For a file that ``--additional-config '{"omni_sched": FILE}'`` names."""
    import yaml

    head = "".join(f"# {line}\n" for line in (what, said) if line)
    return head + yaml.safe_dump(options, sort_keys=False)


def as_record(compared: Comparison | None) -> dict[str, Any] | None:
    """For JSON."""
    if compared is None:
        return None
    return {
        "seeds": list(compared.seeds),
        "confidence_of_each": compared.confidence,
        "default": [run._asdict() for run in compared.default],
        "compared": [
            {
                "options": one.options,
                "attainment_gain": asdict(one.attainment),
                "ttft_p99_change_seconds": asdict(one.ttft_p99),
                "verdict": one.attainment.verdict.value,
                "runs": [run._asdict() for run in one.runs],
            }
            for one in compared.compared
        ],
    }


def _shown(options: Options) -> str:
    return "\n".join(f"{name}: {_value(value)}" for name, value in options.items()) or "default"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


def _within(parts: list[float]) -> str:
    return f"{_mean(parts):.1%}"
