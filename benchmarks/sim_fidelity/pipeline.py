"""Measure and simulate the pipeline of `benchmarks.stages`: text to text, with two replicas of its second stage."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.child import Child, ChildFailed
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.sim_fidelity.pace import REFERENCE, at_usual_pace, with_paces
from benchmarks.sim_fidelity.pipeline_compare import ALL, Pair, compare, measured
from benchmarks.sim_fidelity.pipeline_fit import Fitted, fitted
from benchmarks.sim_fidelity.pipeline_loads import ARRIVALS, Wave, alike, arriving, beside, designed, saturating
from benchmarks.sim_fidelity.pipeline_plot import draw
from benchmarks.sim_fidelity.pipeline_simulate import MAX_NUM_SEQS, REPLICAS, simulated
from dev.omni_cpu.distribution import OUR_PLUGIN, environment
from dev.omni_cpu.spec import TEXT_TO_TEXT, PipelineSpec

EVALUATED = "evaluated"
LOADS = (0.3, 0.6, 0.9)
CAPACITY = 7.0
"""Approximate requests per second that the pipeline finishes when saturated (`saturating`)."""
REFERENCES = 2  # in a row


def run(options: argparse.Namespace) -> None:
    """Measure, or read what was measured; simulate, compare, and write what was found."""
    if options.measured:
        waves = json.loads(options.measured.read_text())
    else:
        waves = [wave for variant in options.variants for wave in measure(variant, options)]
    if options.keep:
        options.keep.write_text(json.dumps(waves))
    pairs: list[Pair] = []
    costs: dict[str, Fitted] = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in options.variants:
            paced = with_paces([wave for wave in waves if wave["variant"] == variant])
            costs[variant] = fitted([_calibrates(wave) for wave in paced if wave["name"] != EVALUATED])
            pairs += [
                Pair(wave, measured(wave["told"]), simulated(costs[variant], wave, Path(folder)))
                for wave in paced
                if wave["name"] == EVALUATED
            ]
    records = compare(pairs)
    console.print(table(records))
    path = options.out / "sim_fidelity_pipeline.json"
    workload = {
        "arrivals": sorted({pair.wave["arrivals"] for pair in pairs}),
        "loads": sorted({pair.wave["load"] for pair in pairs}),
        "requests_per_second_at_load_1": CAPACITY,
        "seeds": sorted({pair.wave["seed"] for pair in pairs}),
    }
    calibration = {
        variant: {"stages": own.stages, "link_seconds": own.link_seconds, "polling": own.polling}
        for variant, own in costs.items()
    }
    paces = {variant: [round(p.wave["pace"], 3) for p in pairs if p.wave["variant"] == variant] for variant in costs}
    extra = {"calibration": calibration, "paces": paces}
    console.print(str(write_result(path, "sim_fidelity", records, seed=options.seed, workload=workload, **extra)))
    console.print(str(draw(path.with_suffix(".png"), pairs, records)))


def _calibrates(wave: dict[str, Any]) -> dict[str, Any]:
    """Return the wave at the usual pace; a reference counts as the designed load that it is."""
    own = at_usual_pace(wave)
    return {**own, "name": f"beside {REPLICAS}"} if wave["name"] == REFERENCE else own


def measure(variant: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all waves of one variant, in order, on a pipeline that has the machine to itself."""
    found = []
    try:
        with pipeline(variant) as child:
            for _ in range(3):  # warm up
                child.ask(requests=alike(4, 40, 12, 24))
            child.ask(requests=saturating(24, options.seed - 1))
            for facts, wave in plan(options.rounds, options.seconds, options.seed):
                answer = child.ask(requests=wave)
                told = {key: answer[key] for key in ("told", "seconds", "cpu_seconds")}
                found.append({"variant": variant, **facts, **told})
                if facts["name"] == EVALUATED:
                    shown = f"{variant}, {facts['arrivals']}, load {facts['load']:g}, seed {facts['seed']}"
                    console.print(shown, highlight=False)
    except ChildFailed as failure:
        raise SystemExit(f"pipeline, {variant}: {failure}") from None
    return found


def plan(rounds: int, seconds: float, seed: int) -> Iterator[tuple[dict[str, Any], Wave]]:
    """Yield loads to calibrate with before, between and after those to evaluate on, with references around all."""
    references = [({"name": REFERENCE}, beside(REPLICAS))] * REFERENCES
    calibration = [({"name": name}, wave) for name, wave in designed().items()]
    yield from references
    yield from calibration
    for turn in range(seed, seed + rounds):
        for load in LOADS:
            for arrivals in ARRIVALS:
                yield from references
                facts = {"name": EVALUATED, "arrivals": arrivals, "load": load, "seed": turn}
                yield facts, arriving(arrivals, load * CAPACITY, seconds, turn)
        yield from references
        yield from calibration
        yield from references


@contextlib.contextmanager
def pipeline(variant: str) -> Iterator[Child]:
    """Start a pipeline as `benchmarks.stages` does; stock runs without our plugin."""
    from dev.tiny_models.llama import write_llama

    model = write_llama(ROOT / ".models" / "llama")
    ours = variant != "stock"
    spec = PipelineSpec(
        TEXT_TO_TEXT,
        "full_payload",
        replicas=REPLICAS,
        replicated=1,
        scheduling={} if ours else None,
        max_num_seqs=MAX_NUM_SEQS,
    )
    folder = Path(tempfile.mkdtemp(prefix="fidelity-"))
    try:
        around = environment(folder / "site", {})
        if not ours:
            plugins = around["VLLM_PLUGINS"].split(",")
            around["VLLM_PLUGINS"] = ",".join(name for name in plugins if name != OUR_PLUGIN)
        path = [Path(word) for word in around.pop("PYTHONPATH").split(":")]
        words = ["--model", str(model), "--folder", str(folder), "--spec", json.dumps(spec.to_json())]
        with Child("benchmarks.sim_fidelity.pipeline_serve", words, path=path, environment=around) as child:
            child.next_event()
            yield child
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(records: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="the pipeline, measured and simulated, ms", title_justify="left", title_style="bold")
    for name in ("variant", "arrivals", "load", "figure", "measured", "simulated", "off", ""):
        shown.add_column(name, justify="left" if name in ("variant", "arrivals", "figure", "") else "right")
    for r in records:
        load = "" if r["arrivals"] == ALL else f"{r['load']:g}"
        talker_step_seconds = {True: "", False: "too far", None: "no bar"}[r.get("within")]
        numbers = (f"{r['measured_ms']:,.4g}", f"{r['simulated_ms']:,.4g}", f"{100 * r['off']:+.1f} %")
        shown.add_row(r["variant"], r["arrivals"], load, r["measure"], *numbers, talker_step_seconds)
    return shown
