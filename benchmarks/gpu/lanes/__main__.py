"""`python -m benchmarks.gpu.lanes`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.device import name_of_gpu, write_gpu_result
from benchmarks.gpu.lanes.plot import picture
from benchmarks.gpu.lanes.report import Sample, lines, record, table
from benchmarks.gpu.lanes.variants import variants
from benchmarks.harness.arguments import add_common, at_least_one
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.screen import console
from vllm_omni_sched.config.errors import LaneError


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    gpu = name_of_gpu("gpu.lanes")
    wait_for_idle_machine(options)
    import torch

    rounds, refused = measure(options)
    found = lines(rounds)
    console.print(table(found, refused, gpu))
    path = write_gpu_result(
        options.out,
        "gpu.lanes",
        gpu,
        record(found, refused),
        {"multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count},
        seed=options.seed,
        workload={
            "decode": f"{options.layers} layers of 4096/14336, batch {options.batch}, context {options.context}",
            "encode": f"ViT-L/14 at 336 pixels, {options.images} images at a time",
            "seconds": options.seconds,
            "rounds": options.rounds,
        },
    )
    console.print(str(path))
    try:
        console.print(str(picture(path.with_suffix(".png"), found, gpu)))
    except ImportError:
        console.print("no picture: matplotlib is missing")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.lanes", description=__doc__)
    parser.add_argument("--batch", type=at_least_one, default=16, help="requests that decode")
    parser.add_argument("--context", type=at_least_one, default=1024, help="tokens of KV cache of each")
    parser.add_argument("--layers", type=at_least_one, default=32, help="of the LLM")
    parser.add_argument("--images", type=at_least_one, default=8, help="images encoded at a time")
    parser.add_argument("--sms", type=counts, default=counts("16,32,48,64"), help="sizes of the lane's part of the GPU")
    parser.add_argument("--shares", type=shares, default=shares("1,0.5,0.25"), help="shares of the lane, in (0, 1]")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one turn")
    add_common(parser, rounds=5, seed_help="of the order in a round")
    return parser.parse_args(arguments)


def counts(text: str) -> list[int]:
    return [at_least_one(part) for part in text.split(",") if part]


def shares(text: str) -> list[float]:
    found = [float(part) for part in text.split(",") if part]
    for share in found:
        if not 0.0 < share <= 1.0:
            raise argparse.ArgumentTypeError(f"a share must be in (0, 1], got {share:g}")
    return found


def measure(options: argparse.Namespace) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Samples by variant, and of those that this machine cannot run the reason."""
    from benchmarks.gpu.lanes.run import DecodeStep, run

    load = build(options)
    steps = {prior: DecodeStep(load, prior) for prior in (False, True)}
    order, todo = random.Random(options.seed), variants(options.sms, options.shares)
    rounds: dict[str, list[Sample]] = {variant.name: [] for variant in todo}
    refused: dict[str, str] = {}
    for turn in range(options.rounds):
        for variant in order.sample(todo, len(todo)):
            try:
                sample = run(variant, load, steps[variant.prior], options.seconds, warm_up=options.seconds / 4)
            except LaneError as error:
                refused[variant.name] = str(error)
            else:
                rounds[variant.name].append(sample)
        todo = [variant for variant in todo if variant.name not in refused]
        console.print(f"round {turn + 1} of {options.rounds}", highlight=False)
    return {name: samples for name, samples in rounds.items() if name not in refused}, refused


def build(options: argparse.Namespace) -> Any:
    import torch

    from benchmarks.gpu.lanes.models import Decoder, VisionTower
    from benchmarks.gpu.lanes.run import Load

    torch.manual_seed(options.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            decoder, tower = Decoder(options.layers, options.batch, options.context).eval(), VisionTower().eval()
        images = torch.randn(options.images, 3, 336, 336).pin_memory()
    finally:
        torch.set_default_dtype(before)
    return Load(decoder, tower, images, options.batch)


if __name__ == "__main__":
    main()
