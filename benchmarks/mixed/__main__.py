"""`python -m benchmarks.mixed`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import some_of
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile
from benchmarks.mixed import VARIANTS
from benchmarks.mixed.plot import draw
from benchmarks.mixed.pooled import gaps_beside, is_good, of_kind, pooled

Answers = dict[tuple[str, float], list[dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    model = options.model or slow_model()
    answers: Answers = {}
    order = random.Random(options.seed)
    version = "?"
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        engines = {}
        for variant in options.variants:
            words = ["--model", str(model), "--variant", variant, "--options", options.options]
            engines[variant] = stack.enter_context(
                Child(
                    "benchmarks.mixed.serve",
                    words,
                    python=options.python,
                    environment={"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
                    | ({"VLLM_PLUGINS": ""} if variant == "stock" else {}),
                )
            )
            version = engines[variant].next_event()["vllm"]
            console.print(f"{variant}: engine up", highlight=False)
        for engine in engines.values():  # warm up
            engine.ask(do="round", load=1.0, seconds=4.0, seed=options.seed + 1_000)
        for load in options.loads:
            for turn in range(options.rounds):
                for variant in order.sample(list(engines), len(engines)):
                    request = {"load": load, "seconds": options.seconds, "seed": options.seed + turn}
                    try:
                        answer = engines[variant].ask(
                            do="round", **request, frames=options.frames, session=options.session
                        )
                    except ChildFailed as failure:
                        raise SystemExit(f"{variant} at load {load}: {failure}") from None
                    answers.setdefault((variant, load), []).append(answer)
            console.print(table(answers, load, options.variants))
    if not answers:
        raise SystemExit("interrupted before the first round had ended: nothing was written")
    workload = {
        "loads": options.loads,
        "seconds": options.seconds,
        "frames": options.frames,
        "session": options.session,
        "options": options.options,
    }
    records = record(dict(sorted(answers.items(), key=lambda item: options.variants.index(item[0][0]))))
    path = options.out / f"mixed-{version}{options.name}.json"
    console.print(str(write_result(path, "mixed", records, seed=options.seed, workload=workload)))
    if picture := draw(path.with_suffix(".png"), records):
        console.print(str(picture))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed", description=__doc__)
    parser.add_argument(
        "--loads", type=lambda text: [float(word) for word in text.split(",")], default=[0.25, 0.5, 1.0]
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=0, help="one request of so many pictures in each round")
    parser.add_argument("--session", action="store_true", help="a realtime session runs beside all of it")
    parser.add_argument("--variants", type=some_of(VARIANTS, "variant"), default=["stock", "ours"])
    parser.add_argument("--options", default="{}", help="more of our options, as JSON", type=checked_json)
    parser.add_argument("--name", default="", help="ends the name of the result file")
    parser.add_argument("--model", help="default: the tiny LLaVA with a slow tower")
    parser.add_argument("--python", default=sys.executable, help="interpreter whose vLLM is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


def checked_json(text: str) -> str:
    json.loads(text)
    return text


def measures(answer: dict[str, Any]) -> dict[str, float]:
    """Return the measures of one round; latencies in milliseconds, of text and of image requests apart."""
    text, image = of_kind(answer, "text"), of_kind(answer, "image")
    gaps = [gap * 1e3 for r in text for gap in r["gaps"]]
    good = [is_good(r) for r in answer["requests"]]
    beside = [gap * 1e3 for gap in gaps_beside(text, image)]
    found = {}
    if gaps:  # a short round may have no text request
        found |= {
            "text ITL P50": quantile(gaps, 0.5),
            "text ITL P99": quantile(gaps, 0.99),
            "text ITL max": max(gaps),
            "text TTFT P50": quantile([r["ttft"] * 1e3 for r in text], 0.5),
        }
    if good:
        found["within SLO %"] = 100.0 * statistics.fmean(good)
        found["tokens / s"] = sum(r["tokens"] for r in answer["requests"]) / answer["seconds"]
    if beside:
        found |= {"ITL beside images P50": quantile(beside, 0.5), "ITL beside images P99": quantile(beside, 0.99)}
    latencies = [1e3 * seconds for r in answer["requests"] for seconds in r.get("latencies", ())]
    if latencies:
        found |= {"session P50": quantile(latencies, 0.5), "session P99": quantile(latencies, 0.99)}
    if image:
        ttft = [r["ttft"] * 1e3 for r in image]
        found |= {"image TTFT P50": quantile(ttft, 0.5), "image TTFT P99": quantile(ttft, 0.99)}
    return found


def table(answers: Answers, load: float, variants: Sequence[str]) -> Table:
    """Medians over the rounds, with the spread; the ratio is the median of the ratios round by round."""
    rounds = {variant: [measures(answer) for answer in answers[variant, load]] for variant in variants}
    shown = Table(title=f"load {load:g}", title_justify="left", title_style="bold")
    shown.add_column("ms unless said")
    for variant in variants:
        shown.add_column(variant, justify="right")
        if variant != variants[0]:
            shown.add_column(f"of {variants[0]}", justify="right")
    for name in dict.fromkeys(name for of_one in rounds.values() for r in of_one for name in r):
        cells = []
        for variant in variants:
            own = [r[name] for r in rounds[variant] if name in r]
            cells.append(f"{statistics.median(own):.4g} ({min(own):.3g}-{max(own):.3g})" if own else "")
            if variant != variants[0]:
                base = [r[name] for r in rounds[variants[0]] if name in r]
                ratios = [a / b for a, b in zip(own, base, strict=False) if b]
                cells.append(f"{statistics.median(ratios):.3f}" if ratios else "")
        shown.add_row(name, *cells)
    for variant in variants[1:]:
        for of_all in pooled(answers[variant, load], answers[variants[0], load]):
            if "ratio" in of_all:
                low, high = of_all["ratio_interval"]
                value = f"{of_all['ratio']:.3f} [{low:.2f}, {high:.2f}]"
                cells = [value if other == variant else "" for other in variants[1:]]
                shown.add_row(of_all["measure"], "", *[cell for one in cells for cell in ("", one)])
    same = same_tokens(answers, load, variants)
    if same:
        shown.add_row("requests with the same tokens %", "", *[f"{100 * statistics.fmean(same):.4g}", ""])
    return shown


def same_tokens(answers: Answers, load: float, variants: Sequence[str]) -> list[bool]:
    """Return, for each request of each variant, whether it got the first variant's tokens."""
    return [
        a["digest"] == b["digest"]
        for variant in variants[1:]
        for mine, base in zip(answers[variant, load], answers[variants[0], load], strict=True)
        for a, b in zip(mine["requests"], base["requests"], strict=True)
    ]


def record(answers: Answers) -> list[dict[str, Any]]:
    found = []
    for (variant, load), rounds in answers.items():
        values: dict[str, list[float]] = {}
        for answer in rounds:
            for name, value in measures(answer).items():
                values.setdefault(name, []).append(value)
        for name, own in values.items():
            found.append({"variant": variant, "load": load, "measure": name, **Summary.of(own).as_dict(3)})
    variants = list(dict.fromkeys(variant for variant, _ in answers))
    for (variant, load), rounds in answers.items():
        for of_all in pooled(rounds, answers[variants[0], load]):
            spread = {"least": of_all["median"], "most": of_all["median"], "iqr": 0.0}
            found.append({"variant": variant, "load": load, **rounded({**of_all, **spread})})
    for load in dict.fromkeys(load for _, load in answers):
        for variant in variants[1:]:
            same = [100.0 * value for value in same_tokens(answers, load, [variants[0], variant])]
            if same:
                name = f"requests with the tokens of {variants[0]} %"
                found.append({"variant": variant, "load": load, "measure": name, **Summary.of(same).as_dict(3)})
    return found


def rounded(record: dict[str, Any], digits: int = 4) -> dict[str, Any]:
    """Return the record with its numbers, and those in its lists, rounded."""
    return {
        key: round(value, digits)
        if isinstance(value, float)
        else [round(one, digits) for one in value]
        if isinstance(value, list)
        else value
        for key, value in record.items()
    }


def slow_model() -> Path:
    from dev.tiny_models import write_llava
    from dev.tiny_models.llava import SLOW_TOWER

    return write_llava(ROOT / ".models" / "llava-slow-tower", **SLOW_TOWER)


if __name__ == "__main__":
    main()
