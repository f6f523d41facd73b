"""The output of `plan`: a page, the same as data, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

if TYPE_CHECKING:
    from vllm_omni_sched.sim.costs.hardware import Link
    from vllm_omni_sched.sim.plan.compare import PlansFound
    from vllm_omni_sched.sim.plan.findings import Confirmed, Limit
    from vllm_omni_sched.sim.plan.load import Load
    from vllm_omni_sched.sim.plan.systems import Choices, System
    from vllm_omni_sched.sim.scenario.scenario import Slo


def page(choices: Choices, load: Load, slo: Slo, found: PlansFound, limited: Limit, given: Sequence[str]) -> Group:
    """Return the whole output as one page, but for the command, which must not be wrapped.

    Args:
        given: devices whose price the user gave.
    """
    best = found.best
    gap = "mean gap between tokens" if slo.itl_of == "mean" else "each gap between tokens"
    what = (
        f"{load.source}: {load.rate:.2f} requests per second, {load.prompt_tokens:,.0f} prompt and "
        f"{load.output_tokens:,.0f} output tokens on average; TTFT {slo.ttft_seconds:g} s, {gap} "
        f"{slo.itl_seconds:g} s, for {slo.attainment:.0%} of the requests"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "GPUs", "$ per hour", "within SLO", "95 % interval", "sure", "P99 TTFT, s", "P99 gap, ms", "busy"):
        table.add_column(name, justify="right" if name else "left", no_wrap=name == "GPUs")
    for name, plan in named(found):
        table.add_row(name, *_cells(plan))
    parts: list[Any] = [
        f"[bold]{_headline(best)}[/bold]",
        what,
        "",
        table,
        "",
        *_sentences(choices, load, slo, found, limited),
        _prices(choices, given),
    ]
    return Group(*parts, "", _servers(best))


def _servers(one: Confirmed) -> str:
    """Return what the commands below are for."""
    prefills, decodes = _numbers(one)
    if prefills:
        return (
            f"{prefills} prefill and {decodes} decode replicas, behind a proxy that sends a request to both; one of "
            "each, on every host with its own VLLM_NIXL_SIDE_CHANNEL_HOST:"
        )
    return f"{decodes} replicas, each:" if decodes > 1 else "One server:"


def _numbers(one: Confirmed) -> tuple[int, int]:
    """Return the numbers of prefill replicas, and of all others."""
    other = one.plan.system.prefill
    return (0, one.plan.replicas) if other is None else (
        other.replicas * one.plan.replicas, other.decodes * one.plan.replicas
    )  # fmt: skip


def command_of(choices: Choices, one: Confirmed) -> str:
    """Return the command of a replica, or of one of each kind."""
    from vllm_omni_sched.sim.plan.systems import command

    return command(choices, one.plan.system)


def named(found: PlansFound) -> list[tuple[str, Confirmed]]:
    """Return the plans with their names, as far as there are any."""
    rows = [
        ("stock, flags as shipped", found.shipped),
        ("stock in one pool", found.together),
        ("stock, misses the SLO", found.missed),
        ("stock at its best", found.stock),
        ("with our options", found.ours),
    ]
    return [(name, one) for name, one in rows if one is not None]


def _headline(best: Confirmed) -> str:
    system, split = best.plan.system, best.plan.system.layout.parallel
    each = f" of {split.devices}" if split.devices > 1 else ""
    prefills, decodes = _numbers(best)
    if prefills:
        replicas = f"{prefills} prefill and {decodes} decode replicas, {prefills}P{decodes}D{each and ', each' + each}"
    else:
        replicas = f"{decodes} replicas{each}" if decodes > 1 else f"one replica{each}"
    return f"{best.plan.devices} x {system.layout.device} ({replicas}), ${best.plan.price:,.2f} per hour"


def _cells(one: Confirmed) -> list[str]:
    devices = f"{one.plan.devices} x {one.plan.system.layout.device}"
    late, gap = max(run.ttft_p99 for run in one.runs), max(run.gap_p99 for run in one.runs)
    busy = f"{sum(run.busy for run in one.runs) / len(one.runs):.0%}"
    if one.plan.system.prefill is not None:
        busy = f"{sum(run.prefill_busy or 0.0 for run in one.runs) / len(one.runs):.0%} / {busy}"
    return [
        devices, f"{one.plan.price:,.2f}", f"{one.attainment:.1%}", f"{one.low:.1%} to {one.high:.1%}",
        f"{one.sure:.0%}", f"{late:.2f}", f"{1e3 * gap:.0f}", busy,
    ]  # fmt: skip


def _sentences(choices: Choices, load: Load, slo: Slo, found: PlansFound, limited: Limit) -> Iterator[str]:
    best = found.best
    yield from _compared(slo, found)
    if best.added:
        replicas = f"{best.added} replicas" if best.added > 1 else "one replica"
        yield f"The held-out requests needed {replicas} more than those of training."
    yield _limited(limited)
    cached = sum(run.cached for run in best.runs) / len(best.runs)
    if cached:
        yield f"The prefix cache has {cached:.0%} of the prompt tokens; replicas get requests in turn."
    if load.patience is not None:
        gave_up = sum(run.gave_up for run in best.runs) / sum(run.requests for run in best.runs)
        yield f"{gave_up:.1%} of the clients give up before their first token; they count as missed."
    yield from _assumed(choices, best.plan.system)
    yield f"Simulated. {_error(choices, best.plan.system)} The interval covers the load alone, not the costs."
    yield from choices.notes


def _error(choices: Choices, system: System) -> str:
    """Return how far the costs of a system are known to be off."""
    from vllm_omni_sched.sim.costs.errors import error_of

    served = choices.calibration is not None and choices.calibration.served
    return error_of(choices.shape, choices.precision, system.layout.parallel, served)


def _compared(slo: Slo, found: PlansFound) -> Iterator[str]:
    """Yield what each way to serve saves over the one before it."""
    stock, ours, shipped, together = found.stock, found.ours, found.shipped, found.together
    if stock is None:
        where = "in training" if found.missed is None else "with the held-out requests"
        yield f"Stock does not meet the SLO {where} within the limit of GPUs, on none of these devices."
    elif together is not None and together.attainment < slo.attainment:
        yield (
            "One pool of stock does not meet the SLO within the limit of GPUs; busy is that of prefill and of decode "
            "replicas."
        )
    elif together is not None:
        yield (
            f"Prefill replicas of their own save {1 - stock.plan.price / together.plan.price:.0%} over one pool of "
            "stock; busy is that of prefill and of decode replicas."
        )
    if ours is None:
        yield "Our options make it no cheaper: serve with stock vLLM, and its flags as below."
    elif stock is not None:
        saved = 1 - ours.plan.price / stock.plan.price
        dollars = stock.plan.price - ours.plan.price
        yield f"Our options save {saved:.0%} over stock at its best: ${dollars:,.2f} per hour."
    tuned = together or stock
    if shipped is None or shipped.attainment < slo.attainment:
        yield "With the flags as shipped, stock does not meet the SLO on these devices within the limit of GPUs."
    elif tuned is not None and shipped.plan.price > tuned.plan.price:
        yield (
            f"The flags of vLLM alone save {1 - tuned.plan.price / shipped.plan.price:.0%} on these devices; anybody "
            "can set them."
        )


def _assumed(choices: Choices, system: System) -> Iterator[str]:
    """Yield what a plan takes from the user, and what is assumed of it."""
    if system.prefill is not None and choices.link is not None:
        speed = choices.link.bytes_per_second / 1e9
        yield f"KV caches go over {choices.link.name}, {speed:g} GB/s for each GPU: {choices.link.source.text}."
        yield "No real engines with prefill replicas were compared with this: try it before you rent."
    drafts, drafter = system.flags.num_speculative_tokens, choices.drafter
    if drafts and drafter is not None:
        made = sum(drafter.acceptance**number for number in range(drafts + 1))
        yield (
            f"Speculation with {drafts} draft tokens makes {made:.2f} tokens a step by your acceptance of "
            f"{drafter.acceptance:g}; drafting one is taken to be {drafter.draft:.1%} of a decode step. "
            "No real engine with speculation was compared with this."
        )
    elif drafter is not None:
        yield "Speculation is not used: it makes the plan no cheaper."


def _prices(choices: Choices, given: Sequence[str]) -> str:
    """Return a sentence with the price of each device, and where it is from."""
    every = [f"{name} {price:,.2f} ({kind})" for name, (price, kind, _) in _priced(choices, given).items()]
    return f"$ per GPU-hour: {', '.join(every)}. Check those that are not given."


def _priced(choices: Choices, given: Sequence[str]) -> dict[str, tuple[float, str, str]]:
    """Return (price, kind of its source, source) of each device."""
    from vllm_omni_sched.sim.plan.systems import PRICE_SOURCES

    found = {}
    for one in choices.layouts:
        source = PRICE_SOURCES.get(one.device)
        if one.device in given or source is None:
            found[one.device] = one.price, "given", "given with --price"
        else:
            found[one.device] = one.price, source.kind.value, source.text
    return found


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
    found: PlansFound,
    limited: Limit,
    given: Sequence[str],
    arguments: Sequence[str],
) -> dict[str, Any]:
    """Return the findings as data for JSON."""
    from vllm_omni_sched.sim.output.files import provenance

    best = found.best.plan.system
    costs = choices.costs(best.layout, best.flags)
    source = {"engine": f"{costs.source.kind.value}: {costs.source.text}"}
    return {
        "simulated": True,
        "provenance": provenance(["vllm-omni-sched", *arguments], 0, source, load.source),
        "slo": slo.model_dump(mode="json"),
        "load": {
            "requests_per_second": load.rate,
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
            "patience_seconds": None if load.patience is None else [load.patience.low, load.patience.high],
        },
        "error_of_costs": _error(choices, best),
        "notes": list(choices.notes),
        "prices": {
            name: {"dollars_per_hour": price, "kind": kind, "source": text}
            for name, (price, kind, text) in _priced(choices, given).items()
        },
        "speculation": None if choices.drafter is None else asdict(choices.drafter),
        "kv_link": None if choices.link is None else _link(choices.link),
        "layouts": len(choices.layouts),
        "trials": found.trials._asdict(),
        "best": "ours" if found.ours is not None else "stock",
        "plans": {name: _plan(choices, one) for name, one in named(found)},
        "limit": asdict(limited),
    }


def _link(link: Link) -> dict[str, Any]:
    return {"name": link.name, "bytes_per_second": link.bytes_per_second, "source": link.source.text}


def _plan(choices: Choices, one: Confirmed) -> dict[str, Any]:
    system = one.plan.system
    prefills, decodes = _numbers(one)
    other = None
    if system.prefill is not None:
        split = system.prefill.layout.parallel
        other = {"tensor_parallel": split.tensor, "replicas": prefills, "flags": asdict(system.prefill.flags)}
    return {
        "device": system.layout.device,
        "tensor_parallel": system.layout.parallel.tensor,
        "pipeline_parallel": system.layout.parallel.pipeline,
        "expert_parallel": system.layout.parallel.experts,
        "replicas": decodes,
        "prefill": other,
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


def draw(choices: Choices, slo: Slo, found: PlansFound, path: Path) -> Path:
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
