"""Derive from figures of a GPU what they would change in the defaults. Pure: rows of results in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from benchmarks.gpu.ipc import SIZES
from benchmarks.gpu.lanes.report import AIM_ITL, AIM_THROUGHPUT

Rows = Sequence[Mapping[str, Any]]


class Advice(str, Enum):
    """Says what to do with a default."""

    KEEP = "keep"
    CHANGE = "change"
    FIX = "fix"  # something is wrong: no default may rely on it


@dataclass(frozen=True)
class Finding:
    """A default that figures speak about. ``now``, ``then``: its value, and the one that the figures suggest."""

    option: str
    now: str
    then: str
    advice: Advice
    why: str

    def as_dict(self) -> dict[str, str]:
        return {**asdict(self), "advice": self.advice.value}


def findings(rows: Mapping[str, Rows]) -> list[Finding]:
    """Return what the rows of each part say, in the order of the parts; parts without rows say nothing."""
    rules: dict[str, Callable[[Rows], list[Finding]]] = {
        "lanes": of_lanes,
        "ipc": of_ipc,
        "nvdec": of_nvdec,
        "frames": of_frames,
        "copies": of_copies,
        "vllm": of_vllm,
    }
    return [one for part, rule in rules.items() if rows.get(part) for one in rule(rows[part])]


def of_lanes(rows: Rows) -> list[Finding]:
    """Return what the lanes say about `encode_ahead` and `encode_lane_sms`.

    1. A lane is good if tokens take at most `AIM_ITL` of their time alone (P99) and it keeps `AIM_THROUGHPUT` of the
       images.
    2. If a lane on all multiprocessors is good without a priority for decode, `encode_ahead` can be on by default on
       GPUs. If one is good only with that priority, vLLM's stream would need it.
    3. If only a part of the multiprocessors makes it good, that is the default: the one with the most images.
    """
    both = [row for row in rows if "itl_p99_of_alone" in row and "images_of_alone" in row]
    lanes = [row for row in both if row["variant"].startswith("lane")]
    if not lanes:
        return []
    good = [row for row in lanes if row["itl_p99_of_alone"] <= AIM_ITL and row["images_of_alone"] >= AIM_THROUGHPUT]
    plain = [row for row in good if row["variant"].startswith("lane, share") and "prior" not in row["variant"]]
    parts = [row for row in good if row["variant"].endswith("SMs")]
    prior = [row for row in good if "prior" in row["variant"]]
    option = "encode_ahead on one GPU"
    if plain:
        best = max(plain, key=_images)
        return [
            Finding(option, "false", "true", Advice.CHANGE, _said(best)),
            Finding("expert.encode_lane_sms", "all", "all", Advice.KEEP, f"{best['variant']} is good without a part"),
        ]
    if parts:
        best = max(parts, key=_images)
        count = best["variant"].removeprefix("lane, ").removesuffix(" SMs")
        return [
            Finding(option, "false", "true", Advice.CHANGE, _said(best)),
            Finding("expert.encode_lane_sms", "all", count, Advice.CHANGE, _said(best)),
        ]
    nearest = min(lanes, key=lambda row: row["itl_p99_of_alone"])
    if prior:
        why = f"{_said(max(prior, key=_images))}; vLLM's stream would need the higher priority"
        return [Finding(option, "false", "false", Advice.KEEP, why)]
    return [Finding(option, "false", "false", Advice.KEEP, f"no lane meets the aim; the nearest: {_said(nearest)}")]


def _images(row: Mapping[str, Any]) -> float:
    return float(row["images_of_alone"])


def _said(row: Mapping[str, Any]) -> str:
    itl, images = row["itl_p99_of_alone"], row["images_of_alone"]
    return f"{row['variant']}: ITL P99 {itl:.2f} of alone with {images:.2f} of the images"


def of_ipc(rows: Rows) -> list[Finding]:
    """Return what messages say about the connector's `min_bytes`.

    1. A wrong tensor, or one that was seen before its kernel had ended, forbids it.
    2. `min_bytes` is the least measured size from which on IPC is always quicker than the arena.
    """
    wrong = sum(row.get("wrong", 0) for row in rows if str(row.get("variant", "")).startswith("cuda_ipc"))
    option, now = "CudaIpcConnector min_bytes", "4 MB"
    if wrong:
        return [Finding(option, now, "do not use it", Advice.FIX, f"{wrong} tensors were wrong")]
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("measure") == "end to end" and "median" in row:
            times.setdefault(row["size"], {})[row["variant"]] = row["median"]
    pairs = [(size, of["cuda_ipc"], of["arena"]) for size, of in times.items() if {"cuda_ipc", "arena"} <= of.keys()]
    if not pairs:
        return []
    pairs.sort(key=lambda pair: SIZES.get(pair[0], 0))
    least = None
    for size, ipc, arena in reversed(pairs):
        if ipc >= arena:
            break
        least = size
    ratios = ", ".join(f"{size} {arena / ipc:.3g}" for size, ipc, arena in pairs)
    why = f"time through the arena over that of IPC: {ratios}"
    if least is None:
        return [Finding(option, now, f"above {pairs[-1][0]}", Advice.CHANGE, why)]
    return [Finding(option, now, least, Advice.KEEP if least == now else Advice.CHANGE, why)]


GAIN = 1.2  # what is less is not worth a default


def of_nvdec(rows: Rows) -> list[Finding]:
    """Return what clips say about `video.nvdec` and `video.nvdec_engines`.

    1. A frame that is not the CPU's forbids it.
    2. It can be `auto` if sampling a video by all engines takes less time than by all processors, for every codec.
    3. All engines are worth having if they take a video in at most 1 / `GAIN` of the time of one.
    """
    wrong = sum(row["wrong"] for row in rows if "wrong" in row)
    if wrong:
        return [Finding("video.nvdec", "off", "off", Advice.FIX, f"{wrong} frames differ from the CPU's")]
    own = [row for row in rows if row.get("decoder") == "nvdec" and "seconds" in row]
    if not own:
        return []
    most = max(row["decoders"] for row in own)
    against_cpu = {f"{row['clip']}, {row['task']}": row["latency_of_cpu"] for row in own if "latency_of_cpu" in row
                   and row["decoders"] == most}  # fmt: skip
    found = []
    if against_cpu:
        slowest = min(against_cpu, key=lambda name: against_cpu[name])
        quicker = against_cpu[slowest] > 1
        why = f"all processors take {against_cpu[slowest]:.3g} times as long as {most} engines for {slowest}, the least"
        found.append(Finding("video.nvdec", "off", "auto" if quicker else "off",
                             Advice.CHANGE if quicker else Advice.KEEP, why))  # fmt: skip
    several = [row["latency_of_one"] for row in own if row["decoders"] == most and "latency_of_one" in row]
    if several:
        worth = max(several) >= GAIN
        why = f"one engine takes {min(several):.3g} to {max(several):.3g} times as long as {most}"
        found.append(Finding("video.nvdec_engines", "auto", "auto" if worth else "1",
                             Advice.KEEP if worth else Advice.CHANGE, why))  # fmt: skip
    return found


def of_frames(rows: Rows) -> list[Finding]:
    """Return what frames that stay on the GPU say about `video.device_bytes`.

    1. A frame that differs forbids it.
    2. It is worth having if frames through host memory take at least `GAIN` times as long, for every video and number
       of frames; its default stays 0 all the same, because the memory of the GPU is the operator's.
    3. Videos whose frames went to the host say nothing.
    """
    option, wrong = "video.device_bytes", sum(row.get("wrong", 0) for row in rows)
    if wrong:
        return [Finding(option, "0", "0", Advice.FIX, f"{wrong} frames differ from those through host memory")]
    ratios = {f"{row['frames']} frames, {row['clip']}": row["host_of_stay"] for row in rows if "host_of_stay" in row}
    if not ratios:
        return []
    least = min(ratios, key=lambda name: ratios[name])
    worth = ratios[least] >= GAIN
    why = f"through host memory it takes {ratios[least]:.3g} times as long for {least}, the least"
    said = "0; recommend it with nvdec" if worth else "0"
    return [Finding(option, "0", said, Advice.CHANGE if worth else Advice.KEEP, why)]


def of_copies(rows: Rows) -> list[Finding]:
    """Return what copies say about `encoder_cache_host_bytes`, and about where frames are put together.

    1. Wrong content forbids it.
    2. The host tier is worth having if an encoding is restored in at most 1 / `GAIN` of the time of its encode, at
       every size; its default stays 0 all the same, because host memory is the operator's.
    """
    wrong = sum(row.get("wrong", 0) for row in rows)
    if wrong:
        return [Finding("encoder_cache_host_bytes", "0", "0", Advice.FIX, f"{wrong} copies were wrong")]
    found = []
    encodes = [row for row in rows if row["task"] == "encode"]
    tiers = [row for row in rows if row["task"] == "host tier"]
    if encodes and tiers:
        each = encodes[0]["encode_seconds"]["median"] / encodes[0]["embeds"]
        ratios = {row["embeds"]: each * row["embeds"] / row["restore_seconds"]["median"] for row in tiers}
        least = min(ratios, key=lambda size: ratios[size])
        worth = ratios[least] >= GAIN
        why = f"an encode takes {ratios[least]:.3g} times as long as a restore of {least} embeddings, the least"
        said = "0; recommend it with encode_ahead" if worth else "0"
        found.append(Finding("encoder_cache_host_bytes", "0", said, Advice.CHANGE if worth else Advice.KEEP, why))
    stitches = [row for row in rows if row["task"] == "stitch"]
    if stitches:
        ratio = min(row["host_seconds"]["median"] / row["device_seconds"]["median"] for row in stitches)
        why = f"through host memory it takes at least {ratio:.3g} times as long"
        better = ratio >= GAIN
        found.append(Finding("frames of several NVDEC engines", "through host memory",
                             "on the device" if better else "through host memory",
                             Advice.CHANGE if better else Advice.KEEP, why))  # fmt: skip
    return found


DELAY = 1.1  # of an image's first token: what is more is a price that operators choose themselves


def of_vllm(rows: Rows) -> list[Finding]:
    """Return what a whole engine says about `encode_ahead`.

    It can be on by default if tokens beside images come at least `GAIN` times as soon (P99), and first tokens of images
    at most `DELAY` times as late (P50).
    """
    ratios = {row["measure"]: row["ratio"] for row in rows if "ratio" in row}
    itl, image = (ratios.get(f"{name}, all rounds together") for name in ("ITL beside images P99", "image TTFT P50"))
    if itl is None or image is None:
        return []
    good = itl <= 1 / GAIN and image <= DELAY
    why = f"in a whole engine, ITL P99 beside images {itl:.2f} of stock, TTFT P50 of images {image:.2f}"
    return [Finding("encode_ahead", "false", "true" if good else "false",
                    Advice.CHANGE if good else Advice.KEEP, why)]  # fmt: skip
