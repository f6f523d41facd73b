"""The dashboard shows every stage metric and no other, and a real Prometheus answers each of its queries."""

import json
import re
import time

import pytest

from tests.support.prometheus import binary, prometheus
from tests.support.stage_traffic import render_module, served_traffic
from vllm_omni_sched.monitor.stage_metrics import STAGE_METRICS

render = render_module()
DASHBOARD = json.loads(render.DASHBOARD.read_text())
PANELS = render.panels(DASHBOARD)
NAME = re.compile(r"vllm:\w+")
PICTURE = b"\x89PNG\r\n\x1a\n"


def used(expr: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAME.findall(expr)}


def test_panels_show_every_stage_metric_and_no_other():
    shown = {name for panel in PANELS for target in panel["targets"] for name in used(target["expr"])}
    assert shown == {metric.full_name for metric in STAGE_METRICS}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_queries_use_the_labels_that_metrics_have(panel):
    labels = {metric.full_name: set(metric.labels) for metric in STAGE_METRICS}
    for target in panel["targets"]:
        expr = target["expr"]
        (name, *others) = used(expr)
        known = labels[name].intersection(*(labels[other] for other in others)) | {"le"}
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(",")}
        filtered = set(re.findall(r"(\w+)=~?\"", expr))
        written = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert grouped | filtered <= known
        assert written <= grouped


def test_every_panel_asks_the_data_source_that_the_reader_chose():
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert (variables, DASHBOARD["schemaVersion"] >= 39) == ({"datasource", "stage"}, True)
    sources = [source["datasource"]["uid"] for panel in PANELS for source in (panel, *panel["targets"])]
    assert set(sources) == {"${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_no_panel_lies_on_another():
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_every_metric_of_a_quantile_is_a_histogram():
    kinds = {metric.full_name: metric.kind for metric in STAGE_METRICS}
    names = {name for panel in PANELS for target in panel["targets"] for name in NAME.findall(target["expr"])}
    parts = {name for name in names if name.endswith(("_bucket", "_sum", "_count"))}
    assert {kinds[re.sub(r"_(bucket|sum|count)$", "", name)] for name in parts} == {"histogram"}
    assert {kinds[name] for name in names - parts} == {"counter", "gauge"}


@pytest.mark.slow
@pytest.mark.skipif(binary() is None, reason="no Prometheus: put `prometheus` on PATH or name it in PROMETHEUS")
def test_a_real_prometheus_answers_every_panel(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the panels: pip install matplotlib")
    with served_traffic() as port, prometheus(binary(), tmp_path, port) as url:
        until = time.monotonic() + 60
        empty = ["not asked yet"]
        while empty and time.monotonic() < until:
            time.sleep(1)
            end = time.time()
            window = render.Window(end - 60, end, 1.0, 5.0)
            answers = {panel["id"]: list(render.series_of(panel, DASHBOARD, url, window)) for panel in PANELS}
            empty = [
                (panel["title"], target["expr"])
                for panel in PANELS
                for target, found in zip(panel["targets"], answers[panel["id"]], strict=True)
                if not any(one.values for one in found)
            ]
    assert empty == []
    shown = {panel: [one for found in answer for one in found] for panel, answer in answers.items()}
    assert {one.name for one in shown[_id("Latency in a stage")]} == {f"{s} P{p}" for s in "012" for p in (50, 90, 99)}
    picture = tmp_path / "stages.png"
    render.draw(DASHBOARD, shown, picture)
    assert picture.read_bytes().startswith(PICTURE)
    assert picture.stat().st_size > 50_000  # lines, not empty panels


def _id(title: str) -> int:
    return next(panel["id"] for panel in PANELS if panel["title"] == title)
