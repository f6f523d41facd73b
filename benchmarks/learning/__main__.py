"""`python -m benchmarks.learning`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.provenance import provenance, write_result
from benchmarks.harness.screen import console
from benchmarks.learning.compare import FIXED, controls, greedy, mean_attainment, overall, plain, summary
from benchmarks.learning.plot import plot
from benchmarks.learning.settings import TEST, TEST_SEEDS, TRAINING, TRAINING_SEEDS, VALIDATION_SEEDS
from benchmarks.learning.train import TARGET_SECONDS, ThompsonChooser, act, train
from vllm_omni_sched.resource.engine.learned import Learned, read
from vllm_omni_sched.sim.episode import EpisodeResult

WEIGHTS = Path("vllm_omni_sched/resource/learned_prefill.json")
PENALTIES = (10.0, 40.0, 160.0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.train:
        learned = trained(options.seed)
        part = options.weights.with_name(options.weights.name + ".part")
        part.write_text(learned.as_json())
        os.replace(part, options.weights)
        console.print(str(options.weights))
        if options.no_test:
            return
    learned = read(options.weights.read_text(), options.weights.name)
    seen = tested(learned, range(options.seeds), options.jobs)
    rng = np.random.default_rng(options.seed)
    records, more = summary(seen, rng), overall(seen, rng)
    console.print(table(records))
    console.print(verdict(more))
    results = {"settings": records, "learned_more": more, "weights": learned.provenance}
    path = options.out / "learning.json"
    workload = {"target_seconds": TARGET_SECONDS, "seeds": options.seeds, "settings": [one.name for one in TEST]}
    console.print(str(write_result(path, "learning", results, seed=options.seed, workload=workload, simulated=True)))
    console.print(str(plot(records, verdict(more), options.out / "learning.png")))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--train", action="store_true", help="train first, and write the weights")
    parser.add_argument("--no-test", action="store_true", help="with --train: end there")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--seeds", type=int, default=len(TEST_SEEDS), help="of the test")
    parser.add_argument("--jobs", type=int, default=2, help="settings that are tested at once")
    add_common(parser, seed=1, seed_help="of what explores, and of the bootstrap")
    return parser.parse_args(arguments)


def trained(seed: int) -> Learned:
    """Train one bandit for each penalty; the one that serves best on training workloads under other seeds is kept."""
    scores: dict[str, float] = {}
    best: Learned | None = None
    with Progress(console=console) as bar:
        for penalty in PENALTIES:
            rng = np.random.default_rng(seed)
            task = bar.add_task(f"penalty {penalty:g}", total=len(TRAINING) * len(TRAINING_SEEDS))
            chooser = train(
                TRAINING,
                TRAINING_SEEDS,
                ThompsonChooser(rng),
                rng,
                lambda setting, one, by, penalty=penalty: act(setting, one, by, penalty),
                lambda done, task=task: bar.update(task, completed=done),
            )
            policy = chooser.policy()
            score = mean_attainment(greedy(policy, penalty), TRAINING, VALIDATION_SEEDS)
            if not scores or score > max(scores.values()):
                best = Learned(policy, penalty, {"pulls": chooser.pulls})
            scores[f"penalty {penalty:g}"] = round(score, 4)
            console.print(f"penalty {penalty:g}: {score:.3f} within the SLO, arms chosen {chooser.pulls}")
        aims = {
            f"{aim:g}": round(mean_attainment(plain("adaptive", aim), TRAINING, VALIDATION_SEEDS), 4) for aim in FIXED
        }
    console.print(f"adaptive by aim: {aims}")
    assert best is not None
    header = provenance(seed=seed)
    kept = {name: header[name] for name in ("date", "command", "revision", "seed", "versions")}
    seeds = {"training": list(TRAINING_SEEDS), "validation": list(VALIDATION_SEEDS)}
    facts = {"settings": [one.name for one in TRAINING], "seeds": seeds, "validation": scores, "fixed_aims": aims}
    return Learned(best.policy, best.penalty, {**kept, **best.provenance, **facts, "simulated": True})


def tested(learned: Learned, seeds: Sequence[int], jobs: int) -> dict[str, dict[str, list[EpisodeResult]]]:
    with Progress(console=console) as bar, ProcessPoolExecutor(jobs) as pool:
        task = bar.add_task("test", total=len(TEST))
        runs = [pool.submit(tested_on, at, learned.as_json(), seeds) for at in range(len(TEST))]
        for run in runs:
            run.add_done_callback(lambda _: bar.advance(task))
        return {setting.name: run.result() for setting, run in zip(TEST, runs, strict=True)}


def tested_on(at: int, weights: str, seeds: Sequence[int]) -> dict[str, list[EpisodeResult]]:
    """Return what each control does in one setting."""
    learned = read(weights, "weights")
    aims = learned.provenance["fixed_aims"]
    found = controls(learned, float(max(aims, key=lambda aim: aims[aim])))
    return {name: [control(TEST[at], seed) for seed in seeds] for name, control in found.items()}


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="Simulated; mean [95 % interval] over seeds", title_justify="left")
    for name in ("setting", "control", "within SLO", "goodput /s", "P99 ITL ms", "P50 TTFT s", "tokens/s"):
        shown.add_column(name, justify="left" if name in ("setting", "control") else "right")
    for one in records:
        low, high = one["attainment"][1:]
        shown.add_row(
            one["setting"],
            one["control"],
            f"{one['attainment'][0]:.3f} [{low:.3f}, {high:.3f}]",
            f"{one['goodput'][0]:.2f}",
            f"{1e3 * one['itl_p99'][0]:.0f}",
            f"{one['ttft_p50'][0]:.3f}",
            f"{one['throughput'][0]:,.0f}",
        )
    return shown


def verdict(more: dict[str, Any]) -> str:
    """Return a sentence on whether learning beats the control that it is made of, and the article's."""
    _, low, high = more["adaptive"]
    verb = "beats" if low > 0 else "is worse than" if high < 0 else "is not known to differ from"
    parts = [f"Learning {verb} the adaptive control that it steers: {points(more['adaptive'])} within the SLO"]
    parts += [f"{points(more[name])} beside {name}" for name in more if name != "adaptive"]
    return "; ".join(parts)


def points(gain: Sequence[float]) -> str:
    mean, low, high = (100 * one for one in gain)
    return f"{mean:+.2f} points [{low:+.2f}, {high:+.2f}]"


if __name__ == "__main__":
    main(sys.argv[1:])
