"""A dashboard shows every metric of its kind and no other, and a real Prometheus answers each of its queries."""

import html
import re
import time
from pathlib import Path

import pytest
import yaml

from tests.support.dashboards import TRAFFIC, read, render_module, served
from tests.support.metric_names import (
    OF_SCRAPES,
    all_metrics,
    base_names,
    connector_metrics,
    device_metrics,
    engine_metrics,
    front_end_metrics,
    labels_asked,
    stage_metrics,
)
from tests.support.prometheus import binary, prometheus
from vllm_omni_sched.monitor.metrics import PREFIX

pytestmark = pytest.mark.waits  # Prometheus looks every second

render = render_module()
DASHBOARDS = {name: read(name) for name in TRAFFIC}
METRICS = {
    "scheduler": engine_metrics() | front_end_metrics() | device_metrics(),
    "stages": stage_metrics() | connector_metrics(),
}
PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in render.panels(dashboard)]
ROOT = Path(__file__).parents[2]
ALERTS, RUNBOOK = ROOT / "deploy" / "prometheus" / "alerts.yaml", ROOT / "docs" / "runbook.md"
PICTURE = b"\x89PNG\r\n\x1a\n"

each_dashboard = pytest.mark.parametrize("name", DASHBOARDS)


def panels(name):
    return render.panels(DASHBOARDS[name])


@each_dashboard
def test_panels_show_every_metric_and_no_other(name):
    exprs = [target["expr"] for panel in panels(name) for target in panel["targets"]]
    assert {used for expr in exprs for used in base_names(expr, METRICS[name])} == set(METRICS[name])


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=[f"{name}: {panel['title']}" for name, panel in PANELS])
def test_queries_use_the_labels_that_metrics_have(name, panel):
    labels = {metric: set(known.labels) for metric, known in METRICS[name].items()}
    for target in panel["targets"]:
        expr = target["expr"]
        known = set.intersection(*(labels[used] for used in base_names(expr, METRICS[name]))) | OF_SCRAPES
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(",")}
        written = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert labels_asked(expr) <= known
        assert written <= grouped


def test_every_metric_that_an_alert_or_the_runbook_names_is_on_a_dashboard():
    exprs = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    named = {used for expr in exprs for used in base_names(expr, all_metrics())}
    words = {PREFIX + word for word in re.findall(r"`(\w+)`", RUNBOOK.read_text())}
    named |= words & set(all_metrics())
    asked = [target["expr"] for _, panel in PANELS for target in panel["targets"]]
    shown = {used for expr in asked for used in base_names(expr, all_metrics())}
    assert PREFIX + "connector_pool_used_bytes" in named
    assert named - shown == set()


@pytest.mark.slow
@pytest.mark.skipif(binary() is None, reason="no Prometheus: put `prometheus` on PATH or name it in PROMETHEUS")
@each_dashboard
def test_a_real_prometheus_answers_every_panel(name, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the panels: pip install matplotlib")
    dashboard, asked = DASHBOARDS[name], panels(name)
    with served(TRAFFIC[name]()) as port, prometheus(binary(), tmp_path, port) as url:
        until = time.monotonic() + 60
        empty = ["not asked yet"]
        while empty and time.monotonic() < until:
            time.sleep(1)
            end = time.time()
            window = render.Window(end - 60, end, 1.0, 5.0)
            answers = {panel["id"]: list(render.series_of(panel, dashboard, url, window)) for panel in asked}
            empty = [
                (panel["title"], target["expr"])
                for panel in asked
                for target, found in zip(panel["targets"], answers[panel["id"]], strict=True)
                if not any(one.values for one in found)
            ]
    assert empty == []
    shown = {panel: [one for found in answer for one in found] for panel, answer in answers.items()}
    if name == "stages":
        latency = next(panel["id"] for panel in asked if panel["title"] == "Latency in a stage")
        assert {one.name for one in shown[latency]} == {f"a:8000 {s} P{p}" for s in "012" for p in (50, 90, 99)}
    page = render.page(dashboard, shown, "a note")
    assert re.findall(r'<img [^>]*alt="([^"]*)" src="data:', page) == [html.escape(panel["title"]) for panel in asked]
    assert not re.search(r"(?:src|href)=.?(?!data:)\w", page)  # nothing is fetched
    picture = tmp_path / "dashboard.png"
    render.draw(dashboard, shown, picture)
    assert picture.read_bytes().startswith(PICTURE)
    assert picture.stat().st_size > 50_000  # lines, not empty panels
