"""The output of `plan`: a page, the same as data, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

if TYPE_CHECKING:
    from vllm_omni_sched.sim.plan.findings import Confirmed, Limit
    from vllm_omni_sched.sim.plan.load import Load
    from vllm_omni_sched.sim.plan.systems import Choices
    from vllm_omni_sched.sim.scenario.scenario import Slo

Found = tuple["Confirmed", "Confirmed | None", "Confirmed | None"]
"""Stock at its best; ours, if it is cheaper; the devices of stock's best with vLLM's default flags."""

ROOFLINE_ERROR = (
    "by the roofline: against published times of Llama on A100, decoding is off by up to 3 % and prompts by 12 %, "
    "single short prompts by up to 40 %, 70B on 8 devices by 22 %; other devices were not compared"
)
MEASURED_ERROR = (
    "measured on your engine: on two CPU cores, such costs gave P50 within 22 % and P99 within 24 % of those of an "
    "engine"
)


def page(choices: Choices, load: Load, slo: Slo, found: Found, limited: Limit) -> Group:
    """Return the whole output as one page, but for the command, which must not be wrapped."""
    best = found[1] or found[0]
    gap = "mean gap between tokens" if slo.itl_of == "mean" else "each gap between tokens"
    what = (
        f"{load.source}: {load.rate:.2f} requests per second, {load.prompt_tokens:,.0f} prompt and "
        f"{load.output_tokens:,.0f} output tokens on average; TTFT {slo.ttft_seconds:g} s, {gap} "
        f"{slo.itl_seconds:g} s, for {slo.attainment:.0%} of the requests"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "GPUs", "$ per hour", "within SLO", "95 % interval", "sure", "P99 TTFT, s", "P99 gap, ms", "busy"):
        table.add_column(name, justify="right" if name else "left", no_wrap=name == "GPUs")
    for name, one in named(found):
        table.add_row(name, *_cells(one))
    parts: list[Any] = [
        f"[bold]{_headline(best)}[/bold]",
        what,
        "",
        table,
        "",
        *_sentences(choices, slo, found, limited),
    ]
    parts += ["", f"{best.plan.replicas} replicas, each:" if best.plan.replicas > 1 else "One server:"]
    return Group(*parts)


def command_of(choices: Choices, one: Confirmed) -> str:
    """Return the command of a replica."""
    from vllm_omni_sched.sim.plan.systems import command

    return command(choices, one.plan.system)


def named(found: Found) -> list[tuple[str, Confirmed]]:
    """Return the plans with their names, as far as there are any."""
    stock, ours, shipped = found
    rows = [("stock, flags as shipped", shipped), ("stock at its best", stock), ("with our options", ours)]
    return [(name, one) for name, one in rows if one is not None]


def _headline(best: Confirmed) -> str:
    system, split = best.plan.system, best.plan.system.layout.parallel
    each = f" of {split.devices}" if split.devices > 1 else ""
    replicas = f"{best.plan.replicas} replicas{each}" if best.plan.replicas > 1 else f"one replica{each}"
    return f"{best.plan.devices} x {system.layout.device} ({replicas}), ${best.plan.price:,.2f} per hour"


def _cells(one: Confirmed) -> list[str]:
    devices = f"{one.plan.devices} x {one.plan.system.layout.device}"
    late, gap = max(run.ttft_p99 for run in one.runs), max(run.gap_p99 for run in one.runs)
    busy = sum(run.busy for run in one.runs) / len(one.runs)
    return [
        devices, f"{one.plan.price:,.2f}", f"{one.attainment:.1%}", f"{one.low:.1%} to {one.high:.1%}",
        f"{one.sure:.0%}", f"{late:.2f}", f"{1e3 * gap:.0f}", f"{busy:.0%}",
    ]  # fmt: skip


def _sentences(choices: Choices, slo: Slo, found: Found, limited: Limit) -> Iterator[str]:
    stock, ours, shipped = found
    best = ours or stock
    if ours is None:
        yield "Our options make it no cheaper: serve with stock vLLM, and its flags as below."
    else:
        saved = 1 - ours.plan.price / stock.plan.price
        dollars = stock.plan.price - ours.plan.price
        yield f"Our options save {saved:.0%} over stock at its best: ${dollars:,.2f} per hour."
    if shipped is None:
        yield "With the flags as shipped, stock does not meet the SLO on these devices within the limit of GPUs."
    elif shipped.plan.replicas > stock.plan.replicas:
        yield (
            f"The flags of vLLM alone save {1 - stock.plan.price / shipped.plan.price:.0%} on these devices; anybody "
            "can set them."
        )
    if best.attainment < slo.attainment:
        yield "With the held-out requests the plan does not meet the SLO within the limit of GPUs: raise --max-gpus."
    yield _limited(limited)
    cached = sum(run.cached for run in best.runs) / len(best.runs)
    if cached:
        yield f"The prefix cache has {cached:.0%} of the prompt tokens; replicas get requests in turn."
    prices = "" if choices.calibration is not None else " Prices are defaults unless given: check them."
    error = MEASURED_ERROR if choices.calibration is not None else ROOFLINE_ERROR
    yield f"Simulated; costs {error}. The interval covers the load alone, not the costs.{prices}"


def _limited(limited: Limit) -> str:
    if limited.faster is None:
        return f"It still holds at {limited.held:g} times the load, so nothing limits it: one replica is the least."
    holds = f"It holds at {limited.held:g} times the load, and fails at {limited.faster:g}. "
    if not limited.resource:
        return holds + "No resource alone limits it there."
    gain = 100 * limited.gains[limited.resource]
    return holds + (
        f"The limit there is {limited.resource}: twice as much brings {gain:.1f} points more within the SLO."
    )


def record(
    choices: Choices,
    load: Load,
    slo: Slo,
    found: Found,
    limited: Limit,
    trials: tuple[int, int],
    arguments: Sequence[str],
) -> dict[str, Any]:
    """Return the findings as data for JSON."""
    from vllm_omni_sched.sim.output.files import provenance
    from vllm_omni_sched.sim.plan.systems import PRICES_OF

    stock, ours, _ = found
    costs = choices.costs(stock.plan.system.layout, stock.plan.system.flags)
    source = {"engine": f"{costs.source.kind.value}: {costs.source.text}"}
    measured = choices.calibration is not None
    return {
        "simulated": True,
        "provenance": provenance(["vllm-omni-sched", *arguments], 0, source, load.source),
        "slo": slo.model_dump(mode="json"),
        "load": {
            "requests_per_second": load.rate,
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
        },
        "error_of_costs": MEASURED_ERROR if measured else ROOFLINE_ERROR,
        "prices": {one.device: one.price for one in choices.layouts},
        "default_prices_of": PRICES_OF,
        "layouts": len(choices.layouts),
        "trials": {"stock": trials[0], "ours": trials[1]},
        "best": "ours" if ours is not None else "stock",
        "plans": {name: _plan(choices, one) for name, one in named(found)},
        "limit": asdict(limited),
    }


def _plan(choices: Choices, one: Confirmed) -> dict[str, Any]:
    system = one.plan.system
    return {
        "device": system.layout.device,
        "tensor_parallel": system.layout.parallel.tensor,
        "pipeline_parallel": system.layout.parallel.pipeline,
        "expert_parallel": system.layout.parallel.experts,
        "replicas": one.plan.replicas,
        "devices": one.plan.devices,
        "dollars_per_hour": one.plan.price,
        "flags": asdict(system.flags),
        "options": None if system.options is None else dict(system.options),
        "command": command_of(choices, one),
        "attainment_in_training": one.plan.attainment,
        "attainment": one.attainment,
        "interval": [one.low, one.high],
        "sure": one.sure,
        "replicas_added_by_held_out": one.added,
        "runs": [asdict(run) for run in one.runs],
    }


def draw(choices: Choices, slo: Slo, found: Found, path: Path) -> Path:
    """Draw the price of each plan, with its devices and what it reaches.

    Raises:
        OSError: the file cannot be written.
    """
    from vllm_omni_sched.sim.output import style

    rows = named(found)
    figure, axes = style.new_figure(height=1.6 + 0.6 * len(rows))
    style.layout(figure, right=0.96, left=0.24)
    prices = [one.plan.price for _, one in rows]
    places = list(range(len(rows)))[::-1]
    axes.barh(places, prices, color=[style.COLOURS[at] for at in range(len(rows))], height=0.55)
    axes.set_yticks(places, [name for name, _ in rows])
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.6 * max(prices))
    for place, (_, one) in zip(places, rows, strict=True):
        text = f"  {one.plan.devices} x {one.plan.system.layout.device}, {one.attainment:.1%} within the SLO"
        axes.text(one.plan.price, place, text, va="center", color=style.INK)
    axes.set_xlabel("dollars per hour")
    what = choices.served if choices.shape is None else choices.shape.name
    style.headline(figure, f"Cheapest plans for {what}", f"held-out requests, {slo.attainment:.0%} needed")
    return style.save(figure, path)
