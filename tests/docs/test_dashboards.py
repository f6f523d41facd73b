"""A dashboard shows every metric of its kind and no other, and a real Prometheus answers each of its queries."""

import html
import re
import time
from pathlib import Path

import pytest
import yaml

from tests.support.dashboards import TRAFFIC, read, render_module, served
from tests.support.metric_names import (
    NAME,
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
VARIABLES = {"scheduler": {"datasource", "instance", "model"}, "stages": {"datasource", "instance", "stage"}}
PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in render.panels(dashboard)]
ROOT = Path(__file__).parents[2]
ALERTS, RUNBOOK = ROOT / "deploy" / "prometheus" / "alerts.yaml", ROOT / "docs" / "runbook.md"
RATE = re.compile(r"((?:sum|avg)[^(]*(?:\([^)]*\))? ?)\(rate\((vllm:\w+)")
OF_ALL_SERVERS = {"Memory of an encode, for each embedding"}
"""Panels of the most that any server has."""
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


@each_dashboard
def test_every_panel_asks_the_data_source_that_the_reader_chose(name):
    dashboard = DASHBOARDS[name]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert (variables, dashboard["schemaVersion"] >= 39) == (VARIABLES[name], True)
    sources = [source["datasource"]["uid"] for panel in panels(name) for source in (panel, *panel["targets"])]
    assert set(sources) == {"${datasource}"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_metric_that_an_alert_or_the_runbook_names_is_on_a_dashboard():
    exprs = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    named = {used for expr in exprs for used in base_names(expr, all_metrics())}
    words = {PREFIX + word for word in re.findall(r"`(\w+)`", RUNBOOK.read_text())}
    named |= words & set(all_metrics())
    asked = [target["expr"] for _, panel in PANELS for target in panel["targets"]]
    shown = {used for expr in asked for used in base_names(expr, all_metrics())}
    assert PREFIX + "connector_pool_used_bytes" in named
    assert named - shown == set()


@pytest.mark.parametrize(
    ("panel", "rate"),
    [
        pytest.param(panel, rate, id=f"{name}: {panel['title']}, {rate[2]}")
        for name, panel in PANELS
        for target in panel["targets"]
        if (rate := RATE.match(target["expr"])) is not None and "/" not in target["expr"]
    ],
)
def test_rates_have_the_unit_of_a_rate_and_fit_their_axis(panel, rate):
    defaults = panel["fieldConfig"]["defaults"]
    how, counted = rate.groups()
    if "_seconds_total" in counted:  # a share of the time: of several servers, it has no bound unless it is a mean
        assert defaults["unit"] == "percentunit"
        assert how.startswith("avg by (instance") or "max" not in defaults
    else:
        assert defaults["unit"] in (("Bps",) if "_bytes_total" in counted else ("ops", "reqps"))


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=[f"{name}: {panel['title']}" for name, panel in PANELS])
def test_servers_are_told_apart(name, panel):
    """Nothing of one server hides behind another: what is the least, the most or a mean is so within a server."""
    for target in panel["targets"]:
        expr = target["expr"]
        assert expr.count('instance=~"$instance"') == len(NAME.findall(expr))
        if name == "stages" and panel["type"] != "heatmap":
            assert all("instance" in group for group in re.findall(r"by \(([^)]*)\)", expr))
            assert "{{instance}}" in target["legendFormat"]
        if name == "scheduler" and panel["title"] not in OF_ALL_SERVERS:
            assert not re.search(r"\b(min|max|avg) (?!by \(instance)", expr)


@each_dashboard
def test_every_variable_selects(name):
    exprs = [target["expr"] for panel in panels(name) for target in panel["targets"]]
    for variable in VARIABLES[name] - {"datasource"}:
        assert any(f'=~"${variable}"' in expr for expr in exprs), variable


def test_dashboards_are_told_apart():
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)
    assert len({dashboard["title"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


@each_dashboard
def test_no_panel_lies_on_another(name):
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in DASHBOARDS[name]["panels"])
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@each_dashboard
def test_every_metric_of_a_quantile_is_a_histogram(name):
    kinds = {metric: known.kind for metric, known in METRICS[name].items()}
    names = {found for panel in panels(name) for target in panel["targets"] for found in NAME.findall(target["expr"])}
    parts = {found for found in names if found.endswith(("_bucket", "_sum", "_count"))}
    assert {kinds[re.sub(r"_(bucket|sum|count)$", "", part)] for part in parts} == {"histogram"}
    assert {kinds[found] for found in names - parts} == {"counter", "gauge"}


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
