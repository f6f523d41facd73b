"""`python -m benchmarks.backtest`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.backtest import ENGINE, ENVIRONMENT, MODEL, QUIET_CORES, VARIANTS
from benchmarks.backtest.compare import compare
from benchmarks.backtest.figures import lag
from benchmarks.backtest.plot import draw
from benchmarks.backtest.predict import hash_of, predict, seal, write_scenario
from benchmarks.backtest.replay import replay
from benchmarks.backtest.speed import reference_seconds, slower
from benchmarks.backtest.traces import TRACES, Planned, plan, write
from benchmarks.harness.arguments import add_common, some_of
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.processes import OtherProcesses
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.harness.server import Server
from vllm_omni_sched.engine.calibration.served import words_of

CALIBRATION, PREDICTIONS, MEASURED = "calibration.json", "predictions.json", "measured.json"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    model = write_model()
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        planned = plans(model, options, folder)
        predictions = folder / PREDICTIONS
        if not predictions.exists():
            speed = [reference_seconds()]
            calibration = options.calibration or calibrated(model, folder / CALIBRATION, options)
            speed.append(reference_seconds())
            foretold = predicted(options, folder, calibration)
            about = {"calibration": json.loads(calibration.read_text()), "reference_seconds": speed}
            seal(predictions, foretold, seed=options.seed, **about)
        sealed = json.loads(predictions.read_text())
        if (sealed["seed"], list(options.traces)) != (options.seed, list(dict.fromkeys(_traces(sealed)))):
            raise SystemExit(
                f"{predictions} is of seed {sealed['seed']} and {', '.join(dict.fromkeys(_traces(sealed)))}"
            )
        console.print(f"predictions of {sealed['date']}, sha256 {hash_of(predictions)}", highlight=False)
        if options.predict_only:
            return
        replays, version = measure(model, planned, options, folder)
        about = {
            "predictions_sha256": hash_of(predictions),
            "predicted_at": sealed["date"],
            "vllm": version,
            "workload": {"seconds": options.seconds, "repetitions": options.repetitions},
            "replays": [{key: value for key, value in one.items() if key != "answers"} for one in replays],
            "calibration": sealed["calibration"],
            "reference_seconds": sealed["reference_seconds"],
            "slower_than_calibrated": round(
                slower(sealed["reference_seconds"], [at for one in replays for at in one["reference_seconds"]]), 3
            ),
        }
        beside = options.out / "backtest" / f"predictions-{version}{options.name}.json"
        beside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(predictions, beside)
    records = compare(sealed["predictions"], rounds_of(replays))
    console.print(table(records))
    path = options.out / f"backtest-{version}{options.name}.json"
    console.print(str(write_result(path, "backtest", records, seed=options.seed, **about)))
    console.print(str(draw(path.with_suffix(".png"), records)))


def _traces(sealed: dict[str, Any]) -> list[str]:
    return [one["trace"] for one in sealed["predictions"]]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backtest", description=__doc__)
    parser.add_argument("--traces", type=some_of(TRACES, "trace"), default=list(TRACES))
    parser.add_argument("--variants", type=some_of(VARIANTS, "variant"), default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=24.0, help="of arrivals in a trace, behind the warm-up")
    parser.add_argument("--repetitions", type=int, default=3, help="of each measurement, each on a server of its own")
    parser.add_argument("--starts", type=int, default=3, help="of each server in the calibration")
    parser.add_argument("--calibration", type=Path, help="use this file, and measure none")
    parser.add_argument("--predict-only", action="store_true", help="write predictions (with --keep), measure nothing")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep all files here; predictions and replays in it are used"
    )
    add_common(
        parser,
        rounds=3,
        rounds_help="of the calibration",
        seed_help="of the traces; the calibration has other data",
        name=True,
    )
    return parser.parse_args(arguments)


def write_model() -> Path:
    from dev.tiny_models import write_llava

    return write_llava(ROOT / ".models" / "llava-backtest", **MODEL)


def calibrated(model: Path, out: Path, options: argparse.Namespace) -> Path:
    """Calibrate the engine as a user does, with the loads of the product."""
    words = [
        "calibrate",
        str(model),
        "--engine-args",
        json.dumps(ENGINE),
        "--rounds",
        str(options.rounds),
        "--longest",
        "2048",
        "--server",
        "--starts",
        str(options.starts),
    ]
    script = "import sys; from vllm_omni_sched.cli import app; app(sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", script, *words, "--out", str(out)],
        check=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )
    return out


def plans(model: Path, options: argparse.Namespace, folder: Path) -> dict[str, list[Planned]]:
    """Draw the traces and write them for the simulator."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found = {}
    for name in options.traces:
        found[name] = plan(name, options.seconds, options.seed, tokenizer)
        write(folder / f"{name}.jsonl", name, found[name], options.seed)
    return found


def predicted(options: argparse.Namespace, folder: Path, calibration: Path) -> list[dict[str, Any]]:
    return [
        {
            "trace": name,
            "variant": variant,
            "figures": predict(write_scenario(folder, name, variant, options.seconds, calibration)),
        }
        for name in options.traces
        for variant in options.variants
    ]


def measure(
    model: Path, planned: dict[str, list[Planned]], options: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], str]:
    """Replay each trace on a server of each variant, one after the other; return all replays and vLLM's version.

    One server is up at a time, as at the calibration: one that only waits slows the steps of another on the same cores.
    Replays that the folder has already count.
    """
    kept = folder / MEASURED
    replays: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    version = "?"
    for _ in range(options.repetitions):
        for variant in options.variants:
            with ExitStack() as stack:
                server = Server(
                    stack,
                    sys.executable,
                    model,
                    [*words_of({key: value for key, value in ENGINE.items() if key not in PASSED}), *VARIANTS[variant]],
                    log=f"backtest-{variant}",
                    stock=variant == "stock",
                    polling=True,  # the worker is no process of its own
                    environment=ENVIRONMENT,
                )
                server.wait()
                version = server.version()
                for name, requests in planned.items():
                    for _again in range(2):
                        replays.append(watched(server, name, variant, requests, options.seed))
                        kept.write_text(json.dumps(replays))
                        if not replays[-1]["disturbed"]:
                            break
    return replays, version


def watched(server: Server, name: str, variant: str, requests: list[Planned], seed: int) -> dict[str, Any]:
    """Replay a trace once, and say how much of the machine other processes had meanwhile."""
    speed = [reference_seconds()]
    watch = OtherProcesses()
    answers = replay(server.url, requests, seed)
    others = watch.share()
    speed.append(reference_seconds())
    console.print(f"{name}, {variant}: other processes had {others:.2f} cores", highlight=False)
    return {
        "trace": name,
        "variant": variant,
        "other_cores": round(others, 3),
        "disturbed": others > QUIET_CORES,
        "reference_seconds": speed,
        "lag_seconds": lag(answers),
        "answers": answers,
    }


def rounds_of(replays: list[dict[str, Any]]) -> dict[tuple[str, str], list[list[dict[str, Any]]]]:
    """Return the answers of the replays by trace and variant: of the disturbed ones only where there is no other."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in replays:
        found.setdefault((one["trace"], one["variant"]), []).append(one)
    return {
        key: [one["answers"] for one in own if not one["disturbed"]] or [one["answers"] for one in own]
        for key, own in found.items()
    }


PASSED = ("dtype", "enforce_eager")
"""Arguments that `Server` passes by itself."""


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="predicted and measured; times in ms", title_justify="left", title_style="bold")
    for name in ("trace", "variant", "figure", "measured", "predicted", "off", "spread", ""):
        shown.add_column(name, justify="left" if name in ("trace", "variant", "figure", "") else "right")
    for r in records:
        scale = 1.0 if r["figure"] in ("tokens / s", "within SLO") else 1e3
        said = {True: "", False: "missed", None: ""}[r["within"]]
        said += " (within the spread)" if said and r["explained"] else ""
        numbers = (f"{scale * r['measured']:,.4g}", f"{scale * r['predicted']:,.4g}")
        spread = "–" if r["spread"] is None else f"{r['spread']:.1%}"
        shown.add_row(r["trace"], r["variant"], r["figure"], *numbers, f"{r['off']:+.1%}", spread, said)
    return shown


if __name__ == "__main__":
    main()
