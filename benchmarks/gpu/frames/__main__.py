"""`python -m benchmarks.gpu.frames`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.gpu.device import name_of_gpu, write_gpu_result
from benchmarks.gpu.nvdec import CODECS
from benchmarks.harness.arguments import add_common, at_least_one, some_of
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.screen import console
from vllm_omni_sched.config.errors import OmniSchedError

MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    gpu = name_of_gpu("gpu.frames")
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    try:
        rows = measure(options)
    except (OmniSchedError, ImportError) as error:
        raise SystemExit(f"benchmarks.gpu.frames cannot decode on this GPU: {error}") from None
    console.print(table(rows, gpu))
    path = write_gpu_result(
        options.out,
        "gpu.frames",
        gpu,
        rows,
        seed=0,
        workload={"seconds": options.seconds, "rounds": options.rounds, "device_bytes": options.device_mib * MIB},
        tolerance="none: frames are compared to the bit",
    )
    console.print(str(path))
    if found := complaints(rows):
        raise SystemExit("; ".join(found))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.frames", description=__doc__)
    parser.add_argument("--codecs", type=some_of(CODECS, "codec"), default=["h264"], help="separated by commas")
    parser.add_argument("--seconds", type=at_least_one, default=10, help="of a clip, 720p30")
    parser.add_argument("--device-mib", type=at_least_one, default=1024, help="memory of the GPU for frames")
    add_common(parser, rounds=10, seed=None)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of all clips, decoded by all engines of the GPUs.

    Raises:
        ConfigError: no GPU decodes here.
        ImportError: PyAV is not installed.
    """
    import torch

    from benchmarks.gpu.frames.measure import compared
    from benchmarks.gpu.nvdec.clips import encoded
    from vllm_omni_sched.video.on_device import FramesReason
    from vllm_omni_sched.video.options import VideoOptions
    from vllm_omni_sched.video.service import FlashCodec

    chosen = VideoOptions.model_validate({"nvdec": "on", "device_bytes": options.device_mib * MIB})
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    with (
        FlashCodec(chosen, place=FramesReason.ON_DEVICE, device=device.index) as stay,
        FlashCodec(chosen) as through_host,
    ):
        for codec in options.codecs:
            console.print(f"{codec}: making a clip, and measuring", highlight=False)
            rows += compared(codec, encoded(codec, options.seconds), stay, through_host, options.rounds, device)
    return rows


def table(rows: Sequence[Mapping[str, Any]], gpu: str) -> Table:
    """Return the table for the screen: milliseconds from the file to frames on the GPU."""
    shown = Table(title=f"frames on {gpu}", title_justify="left", title_style="bold")
    for column in ("clip", "frames", "stay, ms", "through the host, ms", "×", "wrong"):
        shown.add_column(column, justify="right")
    for row in rows:
        if "refused" in row:
            shown.add_row(row["clip"], str(row["frames"]), row["refused"], style="red")
            continue
        times = [f"{row[name]['median'] * 1e3:.4g}" for name in ("stay_seconds", "host_seconds")]
        cells = (row["clip"], str(row["frames"]), *times, f"{row['host_of_stay']:.3g}", str(row["wrong"]))
        shown.add_row(*cells, style="red" if row["wrong"] else None)
    return shown


def complaints(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what must not be: frames that differ, and frames that did not stay."""
    said = [f"{row['clip']}: {row['wrong']} frames differ" for row in rows if row.get("wrong")]
    return said + [f"{row['clip']}: frames went to the host, {row['refused']}" for row in rows if "refused" in row]


if __name__ == "__main__":
    main()
