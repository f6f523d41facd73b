"""``vllm-omni-sched plan``: finds the cheapest devices, replicas, flags and options for a trace and an SLO."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TextColumn

from vllm_omni_sched.cli import plan_view
from vllm_omni_sched.cli.console import INTERRUPTED, USAGE, leave, page_console, progress_bar
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.sim.workloads.importers import TraceFormat

if TYPE_CHECKING:
    from vllm_omni_sched.sim.costs.models import ModelShape, WeightFormat
    from vllm_omni_sched.sim.plan.load import Load, Patience
    from vllm_omni_sched.sim.plan.systems import Choices, Drafter
    from vllm_omni_sched.sim.scenario.scenario import Slo
    from vllm_omni_sched.sim.workloads.trace import Trace

_leave = partial(leave, "plan")


def plan(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="A trace or statistics, as `record` and `import` write them.", show_default=False
        ),
    ],
    slo: Annotated[
        str, typer.Option(help="Targets: ttft and either itl (each gap) or tpot (their mean), in seconds; attainment.")
    ] = "ttft=2,itl=0.1,attainment=0.9",
    model: Annotated[str, typer.Option(help="The model: a known name, or its config.json.")] = "qwen2.5-vl-7b",
    format: Annotated[
        TraceFormat | None,
        typer.Option("--format", help="Who wrote the trace, if it was not imported.", show_default=False),
    ] = None,
    gpus: Annotated[
        str, typer.Option(help="Kinds of devices to try, with commas; default: all with a price.", show_default=False)
    ] = "",
    price: Annotated[
        list[str] | None, typer.Option(metavar="GPU=DOLLARS", help="Price of a device and hour.", show_default=False)
    ] = None,
    max_gpus: Annotated[int, typer.Option(min=1, max=100_000, help="Most devices in all.")] = 64,
    weights: Annotated[
        str, typer.Option(help="bf16, fp8, int8, int4, mxfp4 or nvfp4; default: as the checkpoint.", show_default=False)
    ] = "",
    kv_fp8: Annotated[bool, typer.Option("--kv-fp8", help="KV cache in FP8.")] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Costs measured on your engine, instead of a model; needs one GPU kind.",
            show_default=False,
        ),
    ] = None,
    gpus_each: Annotated[int, typer.Option(min=1, max=1024, help="With --calibration: devices of the engine.")] = 1,
    served: Annotated[str, typer.Option(help="Name of the model in the command.", show_default=False)] = "",
    scale: Annotated[float, typer.Option(help="Factor on the rate of the trace.")] = 1.0,
    patience: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            help="Clients without a first token give up after so long, or LOW-HIGH evenly; default: never.",
            show_default=False,
        ),
    ] = "",
    speculation: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Speculative decoding that may be used: method=eagle3,model=NAME,acceptance=0.7,draft=0.05.",
            show_default=False,
        ),
    ] = "",
    split: Annotated[
        bool, typer.Option("--split/--no-split", help="Also try prefill and decode on replicas of their own.")
    ] = True,
    kv_link: Annotated[
        str, typer.Option(help="With --split: link of a GPU for KV caches, a known name or GB/s.")
    ] = "ethernet-400g",
    item_embeds: Annotated[int, typer.Option(min=0, help="For a trace of intervals: embeddings of an item.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Replicas simulated for each trial.")] = 2,
    trials: Annotated[int, typer.Option(min=4, max=10_000, help="Most trials of a layout at one size.")] = 24,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the findings here, as JSON.", show_default=False)
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture here.", show_default=False)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Plan a cluster for your trace: the cheapest devices, replicas, flags of vLLM and options, simulated.

    Stock vLLM is planned first, with its flags tuned; our options only count for what they save beyond that. Exit
    status: 0 on success, 2 if an argument is invalid or no plan meets the SLO, 130 if it was interrupted.
    """
    # imported late: these modules need numpy
    from vllm_omni_sched.sim.output.files import write_text
    from vllm_omni_sched.sim.plan.compare import find_plans
    from vllm_omni_sched.sim.plan.findings import limit
    from vllm_omni_sched.sim.plan.load import Load
    from vllm_omni_sched.sim.plan.search import Planner
    from vllm_omni_sched.sim.workloads.replay import TraceOptions

    if png is not None and find_spec("matplotlib") is None:
        _leave(USAGE, f"matplotlib is not installed: {how_to_install('sim')}")
    if not 0 < scale <= 1e6:
        _leave(USAGE, f"--scale must be positive, got {scale:g}")
    try:
        targets = _targets(slo)
        options = TraceOptions(file=trace.name, scale=scale, item_embeds=item_embeds)
        load = Load(_trace(trace, format), options, _patience(patience))
        kinds = [name.strip() for name in gpus.split(",") if name.strip()]
        choices = _choices(
            load, model, served, kinds, _prices(price or []), max_gpus, (weights, kv_fp8), calibration, gpus_each
        )
        choices = _further(choices, speculation, kv_link if split else "")
        with progress_bar(TextColumn("{task.fields[text]}"), quiet=quiet) as bar:
            task = bar.add_task("Planning", total=None, text="")

            def report(done: int, text: str) -> None:
                bar.update(task, text=f"{done} trials, {text}")

            planner = Planner(choices, load, targets, seeds, trials, report)
            every = find_plans(planner, choices, load, targets)
            limited = limit(choices, load, targets, every.best.plan)
    except ConfigError as error:
        _leave(USAGE, str(error))
    except KeyboardInterrupt:
        _leave(INTERRUPTED, "interrupted; nothing is written")
    given = [word.partition("=")[0] for word in price or []]
    body = plan_view.record(choices, load, targets, every, limited, given, sys.argv[1:])
    page_console().print(plan_view.page(choices, load, targets, every, limited, given))
    typer.echo(plan_view.command_of(choices, every.best))
    try:
        if out is not None:
            write_text(out, json.dumps(body, indent=1) + "\n")
        if png is not None:
            plan_view.draw(choices, targets, every, png)
    except OSError as error:
        _leave(USAGE, f"{error.filename or out or png}: {error.strerror or error}")


def _targets(text: str) -> Slo:
    from vllm_omni_sched.sim.scenario.scenario import Slo

    names = {"ttft": "ttft_seconds", "itl": "itl_seconds", "tpot": "itl_seconds", "attainment": "attainment"}
    found: dict[str, float] = {}
    of = "each"
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if name not in names or not 0 < number < float("inf") or (name == "attainment" and number > 1):
            raise ConfigError(f"--slo {word.strip()!r}: write it as ttft=2,itl=0.1,attainment=0.9, or tpot for itl; "
                              "seconds above 0, and a fraction")  # fmt: skip
        if names[name] in found:
            raise ConfigError(f"--slo: {name} is given twice, or both itl and tpot: keep one")
        found[names[name]] = number
        of = "mean" if name == "tpot" else of
    return Slo.model_validate({**found, "itl_of": of})


def _patience(text: str) -> Patience | None:
    from vllm_omni_sched.sim.plan.load import Patience

    if not text:
        return None
    low, _, high = text.partition("-")
    try:
        found = Patience(float(low), float(high or low))
    except ValueError:
        found = Patience(0.0, 0.0)
    if not 0 < found.low <= found.high < float("inf"):
        raise ConfigError(f"--patience {text!r}: write it as 10, or 5-30 for clients that differ; seconds above 0")
    return found


def _further(choices: Choices, speculation: str, kv_link: str) -> Choices:
    """Return the choices with what else stock may use: draft tokens, and prefill replicas over this link."""
    from vllm_omni_sched.sim.costs.base import Source, SourceKind, pick
    from vllm_omni_sched.sim.costs.hardware import LINKS, Link

    if choices.shape is None:  # a calibration has neither the bytes of a KV cache, nor the cost of verifying
        if speculation:
            raise ConfigError("--speculation needs --model: a calibration has no cost of verifying draft tokens")
        return choices
    if speculation:
        choices = replace(choices, drafter=_drafter(speculation, choices.shape))
    if not kv_link:
        return choices
    try:
        speed = float(kv_link) * 1e9
    except ValueError:
        return replace(choices, link=pick("--kv-link", kv_link, LINKS))
    if not 0 < speed < float("inf"):
        raise ConfigError(f"--kv-link must be above 0 GB/s, got {kv_link}")
    given = Source(SourceKind.ASSUMED, "given with --kv-link")
    latency = LINKS["ethernet-400g"]
    link = Link("a link of yours", speed, latency.latency_seconds, given, latency.latency_source)
    return replace(choices, link=link)


def _drafter(text: str, shape: ModelShape) -> Drafter:
    from vllm_omni_sched.sim.plan.systems import Drafter, draft_of_a_layer

    given: dict[str, str] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in ("method", "model", "acceptance", "draft") or not value or name in given:
            raise ConfigError(
                f"--speculation {word.strip()!r}: write it as method=ngram,acceptance=0.4, with model=NAME for a "
                "drafter, and draft=PART for its cost; each once"
            )
        given[name] = value
    if missing := [name for name in ("method", "acceptance") if name not in given]:
        raise ConfigError(f"--speculation: {missing[0]} is missing: write it as method=ngram,acceptance=0.4")
    grams = given["method"].startswith("ngram")
    if not grams and "model" not in given:
        raise ConfigError(f"--speculation: method {given['method']!r} needs model=NAME, the drafter")
    numbers = {}
    default = 0.0 if grams else draft_of_a_layer(shape)
    for name, most in (("acceptance", 1.0), ("draft", 1.0)):
        try:
            numbers[name] = float(given.get(name, default))
        except ValueError:
            numbers[name] = -1.0
        if not 0 <= numbers[name] <= most:
            raise ConfigError(f"--speculation: {name} must be between 0 and {most:g}, got {given[name]!r}")
    return Drafter(given["method"], numbers["acceptance"], numbers["draft"], given.get("model", ""))


def _trace(path: Path, format: TraceFormat | None) -> Trace:
    from vllm_omni_sched.sim.workloads.importers import format_of, import_trace
    from vllm_omni_sched.sim.workloads.statistics import (
        drawn_trace,
        import_statistics,
        is_statistics,
        read_statistics,
    )
    from vllm_omni_sched.sim.workloads.trace import NotATraceError, read_trace

    if format is TraceFormat.SERVEGEN:
        return drawn_trace(import_statistics(path, format))
    if format is None and is_statistics(path):
        return drawn_trace(read_statistics(path))
    if format is not None:
        return import_trace(path, format).trace
    if (theirs := format_of(path)) is not None:
        raise ConfigError(f"{path} has the fields of a trace of {theirs.value}: add --format {theirs.value}")
    try:
        return read_trace(path)
    except NotATraceError as error:
        formats = ", ".join(one.value for one in TraceFormat)
        raise ConfigError(f"{error}; if others wrote it, name the --format: {formats}") from None


def _prices(given: list[str]) -> dict[str, float]:
    from vllm_omni_sched.sim.costs.base import pick
    from vllm_omni_sched.sim.costs.hardware import DEVICES
    from vllm_omni_sched.sim.plan.systems import PRICES

    found = dict(PRICES)
    for word in given:
        name, _, value = word.partition("=")
        pick("device", name, DEVICES)
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < float("inf"):
            raise ConfigError(f"--price {word}: write it as GPU=DOLLARS, such as h100-80gb=2.50")
    return found


def _choices(
    load: Load,
    model: str,
    served: str,
    kinds: list[str],
    prices: dict[str, float],
    most: int,
    precision: tuple[str, bool],
    calibration: Path | None,
    each: int,
) -> Choices:
    from vllm_omni_sched.sim.costs.base import pick
    from vllm_omni_sched.sim.costs.config_json import read_config
    from vllm_omni_sched.sim.costs.hardware import device
    from vllm_omni_sched.sim.costs.measured import MeasuredCosts
    from vllm_omni_sched.sim.costs.models import MODELS, Precision, WeightFormat
    from vllm_omni_sched.sim.costs.roofline import Parallel
    from vllm_omni_sched.sim.plan.systems import PLACEHOLDER, Choices, Flags, Layout, known_devices, offer, with_context

    for name in kinds:
        device(name)
    if calibration is not None:
        if len(kinds) != 1 or kinds[0] not in prices:
            raise ConfigError("--calibration needs --gpus with the one kind that was measured, and its --price")
        if precision[0] or precision[1]:
            raise ConfigError("--weights and --kv-fp8 need --model: a calibration is of the engine as it was measured")
        layout, costs = Layout(kinds[0], Parallel(each), prices[kinds[0]]), MeasuredCosts.read(calibration)
        found = Choices(
            None,
            served or PLACEHOLDER,
            (layout,),
            most,
            load.items,
            calibration=costs,
            longest=load.longest,
            notes=() if served else (_UNNAMED,),
        )
        if (room := found.room(layout, Flags())) < load.longest:
            raise ConfigError(
                f"the longest request has {load.longest:,} tokens with its answer, and the KV cache of the calibrated "
                f"engine has room for {room:,}: calibrate one with more, or leave such requests out"
            )
        return found
    file, formats = Path(model), [one.value for one in WeightFormat]
    if precision[0] and precision[0] not in formats:
        raise ConfigError(f"--weights must be one of {', '.join(formats)}, got {precision[0]!r}")
    weights, of_file = WeightFormat(precision[0]) if precision[0] else None, file.suffix == ".json" or file.is_dir()
    shape = read_config(file, served, weights) if of_file else pick("model", model, MODELS)
    own = shape.precision
    form = Precision(weights or own.weights, precision[1] or own.kv_fp8)
    if load.longest > shape.max_model_len:
        raise ConfigError(
            f"a request has {load.longest} tokens with its answer, and {shape.name} takes {shape.max_model_len}: "
            "choose another model, or leave such requests out"
        )
    name, notes = _named(shape, served, of_file)
    notes += _of_weights(shape, form.weights, served, name)
    shape = with_context(shape, load.tokens)
    offered = offer(shape, kinds or known_devices(), prices, form, most, load.longest)
    if offered.refused:
        notes += (
            f"Left out, as the longest request has {load.longest:,} tokens with its answer: "
            f"{'; '.join(offered.refused)}.",
        )
    return Choices(shape, name, offered.layouts, most, load.items, form, longest=load.longest, notes=notes)


_UNNAMED = "Write the name of your model for MODEL in the command, or give it with --served."
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")


def _named(shape: ModelShape, served: str, of_file: bool) -> tuple[str, tuple[str, ...]]:
    """Return the name of the model in commands, and what the user has to know of it."""
    from vllm_omni_sched.sim.plan.systems import PLACEHOLDER

    if served:
        return served, ()
    if not of_file and shape.hub:
        return shape.hub, ()
    if of_file and _HUB_NAME.fullmatch(shape.name):
        return shape.name, (f"The name {shape.name} is that in its config.json: check it, or set --served.",)
    return PLACEHOLDER, (_UNNAMED,)


def _of_weights(shape: ModelShape, wanted: WeightFormat, served: str, name: str) -> tuple[str, ...]:
    """Return what the command needs for weights of this format.

    Raises:
        ConfigError: the checkpoint has another format that vLLM does not make of it, and --served names no other.
    """
    from vllm_omni_sched.sim.plan.systems import quantized_at_start

    own = shape.precision.weights
    if wanted is own:
        return ()
    if quantized_at_start(own, wanted):
        return (
            f"vLLM makes the {wanted.value} weights of {name} from {own.value} ones when it loads them. For a "
            "checkpoint that has them already, give its config.json as --model.",
        )
    if not served:
        raise ConfigError(
            f"--weights {wanted.value}: the checkpoint of {shape.name} has {own.value} weights, and vLLM makes no "
            f"{wanted.value} ones from them: name a checkpoint that has them with --served, or give its config.json as "
            "--model"
        )
    return (f"{served} must be a checkpoint with {wanted.value} weights: those of --model are {own.value}.",)
