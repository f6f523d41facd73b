"""`python -m benchmarks.mixed`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import add_common, at_least_one, some_of
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.mixed import VARIANTS, environment_of
from benchmarks.mixed.plot import draw
from benchmarks.mixed.report import Answers, record, table


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    model = options.model or (large_model() if options.large else slow_model())
    answers: Answers = {}
    order = random.Random(options.seed)
    version = "?"
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        engines = {}
        for variant in options.variants:
            words = ["--model", str(model), "--variant", variant, "--options", options.options]
            words += ["--tensor-parallel", str(options.tensor_parallel)]
            words += ["--engine", options.engine, "--side", str(options.side)]
            words += ["--large"] * options.large
            engines[variant] = stack.enter_context(
                Child(
                    "benchmarks.mixed.serve",
                    words,
                    python=options.python,
                    environment={"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
                    | environment_of(variant, sorted(os.sched_getaffinity(0)))
                    | _ranks(options.tensor_parallel),
                )
            )
            version = engines[variant].next_event()["vllm"]
            console.print(f"{variant}: engine up", highlight=False)
        for engine in engines.values():  # warm up
            engine.ask(do="round", load=max(1.0, *options.loads), seconds=4.0, seed=options.seed + 1_000)
        for load in options.loads:
            for turn in range(options.rounds):
                for variant in order.sample(list(engines), len(engines)):
                    request = {"load": load, "seconds": options.seconds, "seed": options.seed + turn}
                    request |= {"frames": options.frames, "pictures": options.pictures}
                    try:
                        answer = engines[variant].ask(do="round", **request, session=options.session)
                    except ChildFailed as failure:
                        raise SystemExit(f"{variant} at load {load}: {failure}") from None
                    answers.setdefault((variant, load), []).append(answer)
            console.print(table(answers, load, options.variants, f"load {load:g}"))
    if not answers:
        raise SystemExit("interrupted before the first round had ended: nothing was written")
    workload = {
        "loads": options.loads,
        "seconds": options.seconds,
        "frames": options.frames,
        "pictures": options.pictures,
        "session": options.session,
        "options": options.options,
        "tensor_parallel": options.tensor_parallel,
        "engine": options.engine,
        "side": options.side,
        "large": options.large,
    }
    records = record(dict(sorted(answers.items(), key=lambda item: options.variants.index(item[0][0]))))
    path = options.out / f"mixed-{version}{options.name}.json"
    console.print(
        str(write_result(path, "mixed", records, seed=options.seed, python=options.python, workload=workload))
    )
    if picture := draw(path.with_suffix(".png"), records):
        console.print(str(picture))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed", description=__doc__)
    parser.add_argument(
        "--loads", type=lambda text: [float(word) for word in text.split(",")], default=[0.25, 0.5, 1.0]
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a round")
    parser.add_argument("--frames", type=int, default=0, help="one request of so many pictures in each round")
    parser.add_argument("--pictures", type=int, default=0, help="draw images from so many; default: all are different")
    parser.add_argument("--session", action="store_true", help="a realtime session runs beside all of it")
    parser.add_argument("--variants", type=some_of(VARIANTS, "variant"), default=["stock", "ours"])
    parser.add_argument("--tensor-parallel", type=at_least_one, default=1, help="ranks, each on its part of the cores")
    parser.add_argument("--options", default="{}", help="more of our options, as JSON", type=checked_json)
    parser.add_argument("--large", action="store_true", help="a model of 14 billion parameters, for a GPU of 80 GB")
    parser.add_argument("--engine", default="{}", help="arguments of the engine, as JSON", type=checked_json)
    parser.add_argument("--side", type=at_least_one, default=336, help="of a picture, in pixels")
    parser.add_argument("--model", help="default: a LLaVA, tiny with a slow tower, or large")
    add_common(parser, rounds=5, python=True, name=True)
    return parser.parse_args(arguments)


def _ranks(number: int) -> dict[str, str]:
    """Return the environment in which each rank has its own part of this machine's processors."""
    if number == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    parts = [cores[rank * len(cores) // number : (rank + 1) * len(cores) // number] for rank in range(number)]
    if not all(parts):
        raise SystemExit(
            f"--tensor-parallel {number} needs at least {number} processors; this machine has {len(cores)}"
        )
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}


def checked_json(text: str) -> str:
    json.loads(text)
    return text


def slow_model() -> Path:
    from dev.tiny_models import write_llava
    from dev.tiny_models.llava import SLOW_TOWER

    return write_llava(ROOT / ".models" / "llava-slow-tower", **SLOW_TOWER)


def large_model() -> Path:
    from dev.tiny_models import write_llava
    from dev.tiny_models.llava import GPU_SIZES

    return write_llava(ROOT / ".models" / "llava-gpu", weights=False, **GPU_SIZES)


if __name__ == "__main__":
    main()
