"""`python -m benchmarks.realtime`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.realtime import FRAME_SECONDS, plot, profile

VARIANTS = ("stock", "ours")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    model = options.model or tiny_model()
    runs: list[dict[str, Any]] = []
    try:
        for sessions in options.sessions:
            for repeat in range(options.repeats):
                for variant in options.variants:  # alternating: a noisy minute hits both
                    runs.append({"variant": variant, "sessions": sessions, "repeat": repeat})
                    run(runs[-1], model, options)
    except KeyboardInterrupt:
        console.print("stopped: what was measured so far")
    runs = [outcome for outcome in runs if outcome.get("buckets")]
    if not runs:
        raise SystemExit("no run got through a bucket of frames")
    version = runs[0]["versions"]["vllm"]
    stem = f"realtime-{version}-{max(options.frames)}x{'-'.join(map(str, options.sessions))}"
    write_result(
        options.out / f"{stem}.json",
        "realtime",
        runs,
        seed=options.seed,
        python=options.python,
        model="tiny VoxtralRealtime, random weights",
    )
    plot.draw(options.out / f"{stem}.png", runs, version)
    console.print(table(runs))
    console.print(f"{options.out / stem}.json, .png")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.realtime", description=__doc__)
    parser.add_argument(
        "--frames",
        type=whole_numbers,
        default=[5000],
        help="frames of a session; with several --sessions a list as long",
    )
    parser.add_argument("--sessions", type=whole_numbers, default=[1], help="sessions at once, a list: 1,8")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--bucket", type=int, default=250, help="frames that one median is taken over")
    parser.add_argument(
        "--stop-ms", type=float, default=2e3 * FRAME_SECONDS, help="stop a run whose median frame takes longer"
    )
    parser.add_argument(
        "--profile", type=int, metavar="FRAME", help="record py-spy of every process from this frame on"
    )
    parser.add_argument("--profile-seconds", type=int, default=15)
    parser.add_argument("--model", help="a VoxtralRealtime; default: the tiny one")
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as a JSON object")
    add_common(parser, python=True)
    options = parser.parse_args(arguments)
    if len(options.frames) == 1:
        options.frames *= len(options.sessions)
    if len(options.frames) != len(options.sessions):
        parser.error("--frames needs one number, or one for each of --sessions")
    if unknown := set(options.variants) - set(VARIANTS):
        parser.error(f"unknown variant {unknown.pop()!r}; there are {', '.join(VARIANTS)}")
    return options


def run(outcome: dict[str, Any], model: Path, options: argparse.Namespace) -> None:
    """Run one engine from start to end; `outcome` says which, and gets what is measured as it comes."""
    variant, sessions = outcome["variant"], outcome["sessions"]
    frames = options.frames[options.sessions.index(sessions)]
    words = ["--model", str(model), "--variant", variant, "--frames", str(frames), "--sessions", str(sessions)]
    words += ["--bucket", str(options.bucket), "--seed", str(options.seed), "--engine", json.dumps(options.engine)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib(frames, sessions)), "HF_HUB_OFFLINE": "1"}
    if variant == "stock":
        environment["VLLM_PLUGINS"] = ""  # an empty allow-list: stock is stock even where the plugin is installed
    outcome |= {"buckets": [], "stopped_early": False}
    with Child("benchmarks.realtime.session", words, python=options.python, environment=environment) as child:
        for event in child.events():
            if event["kind"] == "up":
                outcome["versions"], processes = event["versions"], event["processes"]
                console.print(
                    f"{variant}, {sessions} session(s) of {frames:,} frames: engine up after {event['seconds']} s"
                )
            elif event["kind"] == "bucket":
                outcome["buckets"].append({key: value for key, value in event.items() if key != "kind"})
                milliseconds = event["seconds_per_frame"]["median"] * 1e3
                memory = " / ".join(f"{size >> 20:,}" for size in event["rss_bytes"].values())
                line = f"  {event['frames']:>6,} frames  {milliseconds:7.1f} ms per frame   {memory} MiB resident"
                console.print(line, highlight=False)
                if options.profile is not None and event["frames"] >= options.profile and "profile" not in outcome:
                    outcome["profile"] = show_profile(profile.record(processes, options.profile_seconds))
                if milliseconds > options.stop_ms:
                    outcome["stopped_early"] = True
                    break


def kv_cache_gib(frames: int, sessions: int) -> int:
    """Room for every session whole, so that nothing is preempted: 8 KiB a frame (two float32 caches), rounded up."""
    return 1 + -(-frames * sessions * 8192 // 2**30)


def show_profile(profiles: dict[str, profile.Profile]) -> dict[str, Any]:
    for role, found in profiles.items():
        console.print(f"  [bold]{role}[/]: {found.busy:.2f} threads at work")
        for title, entries in (("in", found.own), ("for", found.inclusive)):
            for name, share in entries:
                console.print(f"    {share:6.1%} {title:3} {name}", highlight=False, markup=False)
    return {role: vars(found) for role, found in profiles.items()}


def table(runs: Sequence[dict[str, Any]]) -> Table:
    """Four points of every run: a quarter, half, three quarters and the end."""
    shown = Table(title="one 80 ms frame, in ms; c / e / w: client, engine core, worker processes")
    for name in ("sessions", "variant", "frames", "median", "p99", "CPU c / e / w", "RSS MiB c / e / w"):
        shown.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    for outcome in runs:
        buckets = outcome["buckets"]
        for i in sorted({len(buckets) * share // 4 - 1 for share in (1, 2, 3, 4)} - {-1}):
            record = buckets[i]
            shown.add_row(
                str(outcome["sessions"]),
                outcome["variant"],
                f"{record['frames']:,}",
                *(f"{record['seconds_per_frame'][key] * 1e3:.1f}" for key in ("median", "p99")),
                " / ".join(f"{seconds * 1e3:.1f}" for seconds in record["cpu_seconds_per_frame"].values()),
                " / ".join(f"{size / 2**20:.0f}" for size in record["rss_bytes"].values()),
            )
        shown.add_section()
    return shown


def whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def tiny_model() -> Path:
    from dev.tiny_models import write_voxtral_realtime

    return write_voxtral_realtime(ROOT / ".models" / "voxtral-realtime")


if __name__ == "__main__":
    main()
