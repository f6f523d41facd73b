"""Fills the generated parts of the documentation from the code they describe.

``python docs/generate.py`` rewrites what lies between ``<!-- generated: NAME -->`` and ``<!-- end -->`` in the pages
and in the README; with ``--check`` it writes nothing and fails when something would change, or when a number or a
revision has no source (`claims.py`). The tests do that.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import change_tables  # noqa: E402 - the root has to be importable first
import claims  # noqa: E402
import costs_tables  # noqa: E402
import fidelity_tables  # noqa: E402
import paper_tables  # noqa: E402
import result_tables  # noqa: E402
import simulator_tables  # noqa: E402
import stage_tables  # noqa: E402
from gains import gains  # noqa: E402
from prometheus_client.core import CounterMetricFamily  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402
from result_tables import default_or_kind, plain_table  # noqa: E402

from patches.series import Series, title_of  # noqa: E402
from vllm_omni_sched import compat  # noqa: E402 - the root has to be importable first
from vllm_omni_sched.config.load import written  # noqa: E402
from vllm_omni_sched.config.options import OmniSchedConfig  # noqa: E402
from vllm_omni_sched.config.profiles import PROFILES  # noqa: E402
from vllm_omni_sched.config.stage_options import StageSchedConfig  # noqa: E402
from vllm_omni_sched.config.units import bytes_of, milliseconds_of  # noqa: E402
from vllm_omni_sched.connectors.arena.options import (  # noqa: E402
    ArenaOptions,
    AudioPool,
    ImagePool,
    PoolOptions,
    TextPool,
)
from vllm_omni_sched.connectors.auto import AutoOptions, ForeignOptions  # noqa: E402
from vllm_omni_sched.connectors.compression.options import CompressionOptions  # noqa: E402
from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcConnectorOptions  # noqa: E402
from vllm_omni_sched.connectors.disk import DiskOptions  # noqa: E402
from vllm_omni_sched.connectors.mooncake import MooncakeOptions  # noqa: E402
from vllm_omni_sched.connectors.tiers import TiersOptions  # noqa: E402
from vllm_omni_sched.connectors.watch import WatchOptions  # noqa: E402
from vllm_omni_sched.engine.metrics.front_end import FrontEndMetric  # noqa: E402
from vllm_omni_sched.engine.preprocess.metrics import PREPROCESS_METRICS  # noqa: E402
from vllm_omni_sched.engine.video.metrics import VIDEO_METRICS  # noqa: E402
from vllm_omni_sched.monitor.counts import SchedulerMetrics  # noqa: E402
from vllm_omni_sched.monitor.device_metrics import DEVICE_METRICS  # noqa: E402
from vllm_omni_sched.monitor.exposition import values_of  # noqa: E402
from vllm_omni_sched.monitor.metrics import METRICS  # noqa: E402
from vllm_omni_sched.monitor.stage_metrics import STAGE_METRICS  # noqa: E402
from vllm_omni_sched.omni.metrics import FACTS, TIMES  # noqa: E402
from vllm_omni_sched.preprocess.options import PreprocessOptions  # noqa: E402
from vllm_omni_sched.video.options import VideoOptions  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def profiles() -> str:
    """Return the profiles with their traffic and the options that they set."""
    rows = []
    for profile, settings in PROFILES.items():
        shown = [f"`{name}: {json.dumps(value).strip(chr(34))}`" for name, value in settings.options.items()]
        shown += ["videos are decoded by `omni_flashcodec`"] if settings.video_loader else []
        rows.append((f"`{profile.value}`", settings.traffic, ", ".join(shown) or "nothing; this is the default"))
    return plain_table(("profile", "traffic", "sets"), rows)


def options(model: type[BaseModel] = OmniSchedConfig, expert: bool = False) -> str:
    """Return the options of a model; of the engine's, those of the group ``expert`` or all others."""
    rows = []
    for name, field in model.model_fields.items():
        if expert is not (written(model, name) != name):
            continue
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel) or default is PydanticUndefined:
            shown = ""
        elif isinstance(default, Enum):
            shown = f"`{default.value}`"
        else:
            shown = "" if default is None else f"`{default if isinstance(default, str) else json.dumps(default)}`"
        rows.append((f"`{name}`", default_or_kind(shown, _values(field)), field.description or ""))
    return plain_table(("option", "default", "meaning"), rows)


def stage_options() -> str:
    """Return a table for each section of the stage scheduler's options, with nested options."""
    parts = []
    for name, field in StageSchedConfig.model_fields.items():
        parts.append(f"\n### {name}\n\n{field.description}\n\n")
        parts.append(plain_table(("option", "default", "meaning"), _option_rows(field.annotation, "")))
    return "".join(parts)


def _option_rows(model: Any, prefix: str) -> Iterable[Sequence[str]]:
    for name, field in model.model_fields.items():
        key, annotation = f"{prefix}{name}", field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _option_rows(annotation, f"{key}.")
            continue
        inner = get_args(annotation)[1] if get_origin(annotation) is dict else None
        named = isinstance(inner, type) and issubclass(inner, BaseModel)
        default = field.get_default(call_default_factory=True)
        if isinstance(default, Enum):
            shown = f"`{default.value}`"
        elif isinstance(default, dict):
            shown = ", ".join(f"`{entry}`" for entry in default)
        else:
            given = default is not None and default is not PydanticUndefined
            shown = f"`{json.dumps(default).strip(chr(34))}`" if given else ""
        yield f"`{key}`", default_or_kind(shown, "by name" if named else _values(field)), field.description or ""
        if named:
            yield from _option_rows(inner, f"{key}.*.")


def pool_options() -> str:
    """Show the defaults of the three pools beside each other."""
    pools = {"text": TextPool(), "image": ImagePool(), "audio": AudioPool()}
    rows = [
        (f"`{name}`", *(f"{getattr(pool, name):,}" for pool in pools.values()), field.description or "")
        for name, field in PoolOptions.model_fields.items()
    ]
    return plain_table(("option, in bytes", *pools, "meaning"), rows)


def _values(field: object) -> str:
    annotation = getattr(field, "annotation", None)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value.value if isinstance(value, Enum) else value}`" for value in get_args(annotation))
    named = [value for kind in get_args(annotation) if get_origin(kind) is Literal for value in get_args(kind)]
    if named and get_origin(annotation) in (Union, UnionType):
        return ", ".join(f"`{value}`" for value in named) + (", whole number" if int in get_args(annotation) else "")
    kind = next((kind for kind in get_args(annotation) if kind is not type(None)), annotation)
    rules = list(getattr(field, "metadata", ()))
    if get_origin(kind) is Annotated:  # `Count | None`
        kind, *inner = get_args(kind)
        rules += [rule for one in inner for rule in getattr(one, "metadata", [one])]
    if get_origin(kind) is list:
        return "list of names"
    if get_origin(annotation) is tuple:
        return "list of " + ", ".join(f"`{member.value}`" for member in kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "options"
    words = {bool: "true, false", int: "whole number", float: "number"}
    text = words.get(kind, "text") if isinstance(kind, type) else "text"
    if get_origin(annotation) is dict:
        inside = get_args(annotation)[1]
        return "options" if inside is Any else "options by name" if inside is ForeignOptions else "by name"
    units = {bytes_of: "size", milliseconds_of: "duration"}
    return next((units[rule.func] for rule in rules if getattr(rule, "func", None) in units), text)


def metrics() -> str:
    rows = []
    for metric in METRICS:
        values = [value for value, _ in values_of(metric, SchedulerMetrics())]
        rows.append((_named(metric.name, metric.kind, _labels(metric.label, values)), metric.help))
    return plain_table(METRIC_COLUMNS, rows)


def front_end_metrics(listed: Sequence[FrontEndMetric]) -> str:
    rows = []
    for metric in listed:
        rows.append((_named(metric.name, metric.kind, _labels(metric.label, metric.values)), metric.help))
    return plain_table(METRIC_COLUMNS, rows)


def stage_metrics() -> str:
    rows = []
    for metric in STAGE_METRICS:
        labels = [f"`{label}`" for label in metric.scope.value]
        if metric.label:
            labels.append(_labels(metric.label, metric.values))
        rows.append((_named(metric.name, metric.kind, ", ".join(labels)), metric.help))
    return plain_table(METRIC_COLUMNS, rows)


def device_metrics() -> str:
    return plain_table(METRIC_COLUMNS, [(f"`{metric.name}`", metric.help) for metric in DEVICE_METRICS])


def connector_metrics() -> str:
    """Return the metrics of connectors, with the labels that they have besides ``path``."""
    rows = [(_named(name, "histogram"), text) for name, text in TIMES.values()]
    for fact in FACTS:
        total = "_total" if fact.kind is CounterMetricFamily else ""
        rows.append((_named(f"{fact.name}{total}", labels=_labels(fact.label, ())), fact.help))
    return plain_table(METRIC_COLUMNS, rows)


METRIC_COLUMNS = ("name, and labels", "meaning")
FEW_VALUES = 4
"""A label with more values is shown without them; `/metrics` has them."""


def _labels(label: str | None, values: Collection[object]) -> str:
    if not label:
        return ""
    named = ", ".join(f"`{value}`" for value in values) if len(values) <= FEW_VALUES else ""
    return f"`{label}`: {named}" if named else f"`{label}`"


def _named(name: str, kind: str = "", labels: str = "") -> str:
    """Return a metric's name with its labels, and its kind if it is a histogram: counters end with `_total`."""
    return f"`{name}`" + (" (histogram)" if kind == "histogram" else "") + (f" by {labels}" if labels else "")


def versions() -> str:
    return ", ".join(v if v.count(".") > 1 else f"{v}.x" for v in compat.SUPPORTED_VERSIONS) + "\n"


def patches() -> str:
    """Show each patch with the versions that it is for, by the subject of its header for the newest one."""
    versions: dict[str, list[str]] = {}
    newest = {}
    for series in map(Series.read, Series.versions()):
        for patch in series.patches:
            versions.setdefault(patch.name, []).append(title_of(series.version))
            newest[patch.name] = patch
    rows = [(f"`{name}`", ", ".join(of), newest[name].subject) for name, of in versions.items()]
    return plain_table(("patch", "for", "what it does"), rows)


def pictures(benchmark: str, folder: str) -> str:
    """Return the pictures of one benchmark, of the newest vLLM where there are several, for a page with them in
    `folder`."""
    found = result_tables.of_newest(sorted(path.name for path in RESULTS.glob(f"{benchmark}*.png")))
    return _pictures(benchmark, folder, found)


def readme_picture(benchmark: str, folder: str) -> str:
    """Return the picture of the newest vLLM with the most sessions."""
    found = result_tables.of_newest([path.name for path in RESULTS.glob(f"{benchmark}*.png")])
    return _pictures(benchmark, folder, sorted(found, key=result_tables.load_of)[-1:])


def _pictures(benchmark: str, folder: str, names: Iterable[str]) -> str:
    return "".join(f"![{PICTURES[benchmark]}]({folder}/{name})\n" for name in names)


PICTURES = {
    "mixed": "Requests within their SLO, inter-token latency and TTFT of image requests against load, stock and ours",
    "realtime": "Milliseconds per 80 ms audio frame as a realtime session grows, stock vLLM and OmniScheduler",
    "streaming": "Tokens of a text stream at the client, the part of them in bursts, and step time, stock and ours",
    "serve": "ITL, TTFT and requests within their SLO that a client measures, stock and ours",
}

OF_FEW = ("text TTFT P99", "picture TTFT P99")
"""Measures of `benchmarks.preprocess` that are the largest of a round's few values."""

MEASURED = ("step_cost", "realtime", "mixed", "gpu", "video_server")
"""The benchmarks that the table of gains is made from."""

PARTS: dict[str, Callable[[], str]] = {
    "options": options,
    "expert-options": lambda: options(expert=True),
    "profiles": profiles,
    "gains": lambda: gains({name: result_tables.load(RESULTS, name) for name in MEASURED}),
    "auto-options": lambda: options(AutoOptions),
    "disk-options": lambda: options(DiskOptions),
    "tiers-options": lambda: options(TiersOptions),
    "foreign-options": lambda: options(ForeignOptions),
    "arena-options": lambda: options(ArenaOptions),
    "pool-options": pool_options,
    "cuda-ipc-options": lambda: options(CudaIpcConnectorOptions),
    "mooncake-options": lambda: options(MooncakeOptions),
    "compression-options": lambda: options(CompressionOptions),
    "handover": lambda: result_tables.handover(result_tables.load(RESULTS, "handover")),
    "connectors": lambda: result_tables.connectors(result_tables.load(RESULTS, "connectors")),
    "metrics": metrics,
    "stage-options": stage_options,
    "stage-metrics": stage_metrics,
    "video-options": lambda: options(VideoOptions),
    "video-metrics": lambda: front_end_metrics(VIDEO_METRICS),
    "preprocess-options": lambda: options(PreprocessOptions),
    "preprocess-metrics": lambda: front_end_metrics(PREPROCESS_METRICS),
    "watch-options": lambda: options(WatchOptions),
    "connector-metrics": connector_metrics,
    "device-metrics": device_metrics,
    "versions": versions,
    "patches": patches,
    "step-cost": lambda: result_tables.step_cost(result_tables.load(RESULTS, "step_cost")),
    "realtime": lambda: result_tables.realtime(result_tables.load(RESULTS, "realtime")),
    "readme-picture": lambda: readme_picture("realtime", "benchmarks/results"),
    "home-picture": lambda: readme_picture("realtime", "../benchmarks/results"),
    "realtime-picture": lambda: pictures("realtime", "../benchmarks/results"),
    "mixed": lambda: result_tables.mixed(result_tables.load(RESULTS, "mixed"), result_tables.load(RESULTS, "gpu")),
    "mixed-picture": lambda: pictures("mixed", "../benchmarks/results"),
    "serve": lambda: result_tables.serve(result_tables.load(RESULTS, "serve")),
    "serve-picture": lambda: pictures("serve", "../benchmarks/results"),
    "readme-serve-picture": lambda: pictures("serve", "benchmarks/results"),
    "video": lambda: result_tables.video(result_tables.load(RESULTS, "video")),
    "video-server": lambda: result_tables.by_measure(
        result_tables.load(RESULTS, "video_server"), "seconds", left_out=["TTFT P99"]
    ),
    "preprocess": lambda: result_tables.by_measure(
        result_tables.load(RESULTS, "preprocess"), "seconds", left_out=OF_FEW
    ),
    "streaming": lambda: result_tables.streaming(result_tables.load(RESULTS, "streaming")),
    "streaming-picture": lambda: pictures("streaming", "../benchmarks/results"),
    "stages": lambda: stage_tables.stages(result_tables.load(RESULTS, "stages")),
    "scenario": simulator_tables.keys,
    "backtest": lambda: fidelity_tables.backtest(result_tables.load(RESULTS, "backtest")),
    "fidelity-pipeline": lambda: fidelity_tables.simulated(result_tables.load(RESULTS, "sim_fidelity")),
    "fidelity-gpu": lambda: fidelity_tables.h200(
        result_tables.load(RESULTS, "gpu"), json.loads((RESULTS / "studies" / "h200-mixed.json").read_text())
    ),
    "forecast-recorded": lambda: fidelity_tables.forecasts(result_tables.load(RESULTS, "forecast")),
    "study-day-night": lambda: change_tables.day_night(paper_tables.study("day-night")),
    "study-failures": lambda: change_tables.failures(paper_tables.study("failures")),
    **costs_tables.PARTS,
    "anomaly": lambda: stage_tables.anomaly(result_tables.load(RESULTS, "anomaly")),
    "gpu-ipc": lambda: result_tables.gpu_ipc(result_tables.load(RESULTS, "gpu")),
    "gpu-lanes": lambda: result_tables.gpu_lanes(result_tables.load(RESULTS, "gpu")),
    **paper_tables.PARTS,
}


def filled(text: str) -> str:
    """`text` with every generated part replaced by what the code says now."""
    return PART.sub(lambda part: part[1] + PARTS[part["name"]]() + part[3], text)


def main(arguments: Sequence[str]) -> int:
    stale = [page for page in PAGES if page.exists() and filled(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'is not up to date' if '--check' in arguments else 'updated'}")
        if "--check" not in arguments:
            page.write_text(filled(page.read_text()))
    wrong = claims.complaints(PAGES, RESULTS) if "--check" in arguments else []
    for one in wrong:
        print(one)
    return 1 if "--check" in arguments and (stale or wrong) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
