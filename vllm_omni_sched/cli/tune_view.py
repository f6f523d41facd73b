"""The output of `tune`: progress, a table, a verdict, YAML."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from vllm_omni_sched.sim.study.search import Options, Search
    from vllm_omni_sched.sim.study.tune import Compared, Comparison, Gain


class Bar:
    """A progress bar on stderr."""

    def __init__(self, what: str, total: int, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True),
                                  transient=True, disable=quiet)  # fmt: skip
        self._task = self._progress.add_task(what, total=total, text="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def at(self, done: int, text: str) -> None:
        self._progress.update(self._task, completed=done, text=text)


def verdict(found: Search, compared: Comparison | None) -> str:
    """Return the result in one to three sentences."""
    text = f"Interrupted after {found.trials} trials. " if found.interrupted else ""
    if compared is None:
        return text + "Interrupted before the held-out seeds were through: the gain is not known."
    baselines, (name, proposed) = compared.baselines, compared.proposed
    if name == compared.now:
        others = [f"{_attained(one)} with {other}" for other, one in baselines.items() if other != name]
        return (
            f"{text}No option is known to help beyond vLLM's own flags: {_attained(proposed)} of the requests are "
            f"within the SLO with {name}" + "".join(f", {one}" for one in others) + "."
        )
    over = "; ".join(
        f"instead of {_attained(baselines[other])} with {other}: {_points(gains.attainment)}"
        for other, gains in proposed.over.items()
    )
    return (
        (f"{text}No option is known to help beyond {name}, which are better than {compared.now}. " if name else text)
        + f"Expected: {_attained(proposed)} of the requests within the SLO, {over}, over {len(compared.seeds)} "
        f"held-out seeds, for all that were compared together. P99 TTFT: {_late(proposed)} s, instead of "
        + ", ".join(f"{_late(baselines[other])} s with {other}" for other in proposed.over)
        + "."
    )


def screen(what: str, text: str, options: Options, found: Search, compared: Comparison | None) -> Group:
    """Return the whole output as one page."""
    table = Table(title=what, title_justify="left", title_style="bold")
    against = [] if compared is None else [f"over {name}, points" for name in compared.baselines]
    for name in ("options", "within SLO", *(against or ["gain"]), "P99 TTFT, s"):
        table.add_column(name, justify="left" if name == "options" else "right", no_wrap=name == "options")
    if compared is None:
        for tried in found.tried[:3]:
            table.add_row(_shown(tried.options), f"{tried.attainment:.1%}", "not known", "")
    else:
        rows = [*compared.baselines.items(), *((_shown(one.options), one) for one in compared.compared)]
        for shown, one in rows:
            gains = [_cell(one.over[name].attainment) if name in one.over else "" for name in compared.baselines]
            table.add_row(shown, _attained(one), *gains, _late(one))
    parts: list[Any] = [table, "", text + " Simulated: confirm it on the real engine."]
    if options:
        parts += ["", as_yaml(options)]
    return Group(*parts)


def as_yaml(options: Options, what: str = "", text: str = "") -> str:
    """Return the options as YAML, for a file that ``--additional-config '{"omni_sched": FILE}'`` names."""
    import yaml

    from vllm_omni_sched.config.load import grouped
    from vllm_omni_sched.sim.study.search import command_line, flags_of, policy_of

    flags = command_line(flags_of(options))
    also = f"with vLLM's own {flags}" if flags else ""
    head = "".join(f"# {line}\n" for line in (what, text, also) if line)
    return head + yaml.safe_dump(grouped(policy_of(options)), sort_keys=False)


def as_record(compared: Comparison | None) -> dict[str, Any] | None:
    """Return the comparison as plain data for JSON; None if there is none."""
    if compared is None:
        return None

    def one_of(one: Compared) -> dict[str, Any]:
        return {
            "options": one.options,
            "over": {
                name: {
                    "attainment_gain": asdict(gains.attainment),
                    "ttft_p99_change_seconds": asdict(gains.ttft_p99),
                    "verdict": gains.attainment.verdict.value,
                }
                for name, gains in one.over.items()
            },
            "runs": [run._asdict() for run in one.runs],
        }

    return {
        "seeds": list(compared.seeds),
        "confidence_of_each": compared.confidence,
        "baselines": {name: one_of(one) for name, one in compared.baselines.items()},
        "compared": [one_of(one) for one in compared.compared],
    }


def _shown(options: Options) -> str:
    return "\n".join(f"{name}: {_value(value)}" for name, value in options.items()) or "none"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _points(gain: Gain) -> str:
    return f"{100 * gain.mean:+.1f} points, 95 % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"


def _cell(gain: Gain) -> str:
    return f"{100 * gain.mean:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def _attained(one: Compared) -> str:
    return f"{float(np.mean([run.attainment for run in one.runs])):.1%}"


def _late(one: Compared) -> str:
    return f"{float(np.mean([run.ttft_p99 for run in one.runs])):.2f}"
