"""Draws a Grafana dashboard from a Prometheus, without Grafana: ``python docs/dashboards/render.py --help``.

Each panel's queries go through Prometheus' HTTP API as Grafana would send them; matplotlib draws the answers where the
dashboard says, as one picture or as a page for a browser. It knows what our dashboards use: rows, time series and
heatmaps.
"""

import argparse
import base64
import html
import io
import json
import math
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parent / "stages.json"
FORMATS = {"s": "s", "bytes": "B", "Bps": "B/s", "reqps": "req/s"}


class Series(NamedTuple):
    """Holds a line of a panel: its name in the legend, its labels, and its points."""

    name: str
    labels: Mapping[str, str]
    seconds: list[float]
    values: list[float]


class Window(NamedTuple):
    """What is asked for, in seconds."""

    start: float
    end: float
    step: float
    rate_interval: float


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the panels that show something; rows do not."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def resolved(expr: str, dashboard: Mapping[str, Any], rate_interval: float) -> str:
    """Return a query with its variables filled in as when everything is selected."""
    expr = expr.replace("$__rate_interval", f"{max(1, round(rate_interval))}s")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            expr = expr.replace(f"${variable['name']}", variable["allValue"])
    return expr


def ask(url: str, expr: str, window: Window) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    """Query ``/api/v1/query_range``; return labels and points of each series."""
    query = {"query": expr, "start": window.start, "end": window.end, "step": window.step}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        result = json.load(answer)["data"]["result"]
    return [(one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in result]


def series_of(
    panel: Mapping[str, Any], dashboard: Mapping[str, Any], url: str, window: Window
) -> Iterator[list[Series]]:
    """Yield the series of each query of a panel, without points that are no numbers."""
    for target in panel["targets"]:
        found = []
        for labels, points in ask(url, resolved(target["expr"], dashboard, window.rate_interval), window):
            name = re.sub(r"\{\{(\w+)\}\}", lambda label, of=labels: of.get(label[1], ""), target["legendFormat"])
            kept = [(at, value) for at, value in points if math.isfinite(value)]
            found.append(Series(name, labels, [at for at, _ in kept], [value for _, value in kept]))
        yield found


def draw(dashboard: Mapping[str, Any], shown: Mapping[int, Sequence[Series]], path: Path, note: str = "") -> None:
    """Draw the dashboard; `shown`: the series of each panel by its id."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 2
    figure = Figure(figsize=(18, height * 0.42), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.01, 1 - 0.9 / height, dashboard["title"] + (f" ({note})" if note else ""), fontsize=14, weight="bold")
    began = min((one.seconds[0] for many in shown.values() for one in many if one.seconds), default=0.0)
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        top = 1 - (grid["y"] + 2) / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.7 / height, panel["title"], fontsize=11, weight="bold", color="#0b7285")
            continue
        left, bottom = grid["x"] / 24 + 0.04, top - (grid["h"] - 2.2) / height
        box = (left, bottom, grid["w"] / 24 - 0.05, (grid["h"] - 3.2) / height)
        _panel(figure.add_axes(box), panel, shown[panel["id"]], began)
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})


def page(dashboard: Mapping[str, Any], shown: Mapping[int, Sequence[Series]], note: str = "") -> str:
    """Return the dashboard as a page that fetches nothing: each panel is a picture of its own, as wide as it says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    began = min((one.seconds[0] for many in shown.values() for one in many if one.seconds), default=0.0)
    title = html.escape(dashboard["title"] + (f" ({note})" if note else ""))
    parts = [PAGE.format(title=title)]
    for panel in dashboard["panels"]:
        name, grid = html.escape(panel["title"]), panel["gridPos"]
        if panel["type"] == "row":
            parts.append(f"<h2>{name}</h2>")
            continue
        figure = Figure(figsize=(grid["w"] * 0.7, grid["h"] * 0.42))
        FigureCanvasAgg(figure)
        _panel(figure.add_axes((0.14, 0.3, 0.83, 0.6)), panel, shown[panel["id"]], began)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        data = base64.b64encode(picture.getvalue()).decode()
        parts.append(f'<img style="--columns: {grid["w"]}" alt="{name}" src="data:image/svg+xml;base64,{data}">')
    return "\n".join([*parts, "</main>", ""])


PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 1rem }}
main {{ display: grid; grid-template-columns: repeat(24, 1fr); gap: .5rem }}
h2 {{ grid-column: 1 / -1; color: #0b7285; margin: 1rem 0 0 }}
img {{ grid-column: span var(--columns); width: 100% }}
@media (max-width: 50rem) {{ img {{ grid-column: 1 / -1 }} }}
</style>
<h1>{title}</h1>
<main>"""


def _panel(axes: Any, panel: Mapping[str, Any], series: Sequence[Series], began: float) -> None:
    axes.set_title(panel["title"], fontsize=9, loc="left")
    axes.set_title("seconds", fontsize=7, loc="right")
    axes.tick_params(labelsize=7)
    series = [one for one in series if one.seconds]
    if not series:
        axes.text(0.5, 0.5, "No data", ha="center", va="center", transform=axes.transAxes)
    elif panel["type"] == "heatmap":
        _heatmap(axes, series, began)
    else:
        _lines(axes, series, began, panel["fieldConfig"]["defaults"])


def _lines(axes: Any, series: Sequence[Series], began: float, defaults: Mapping[str, Any]) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter, ScalarFormatter

    for number, one in enumerate(series):  # there are ten colours
        style = "-" if number < 10 else "--"
        axes.plot([at - began for at in one.seconds], one.values, style, linewidth=1, label=one.name)
    highest = max((value for one in series for value in one.values), default=0.0)
    room = 1.05 * highest if highest > 0 else None  # above a line that hardly changes
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max", room))
    unit = defaults["unit"]
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.yaxis.set_major_formatter(EngFormatter(FORMATS[unit]) if unit in FORMATS else ScalarFormatter())
    axes.grid(alpha=0.3)
    points = 72 * axes.figure.get_figwidth() * axes.get_position().width
    longest = max(len(one.name) for one in series)
    columns = max(1, min(4, int(points / (3.3 * longest + 28))))  # a letter of this size, a line and the gap beside it
    axes.legend(fontsize=6, ncols=columns, loc="upper left", bbox_to_anchor=(-0.02, -0.1), frameon=False)


def _heatmap(axes: Any, series: Sequence[Series], began: float) -> None:
    """Draw the buckets of a Prometheus histogram; each line's count without the lines below it."""
    ordered = sorted(series, key=lambda one: float(one.labels["le"]))
    times = sorted({at for one in ordered for at in one.seconds})
    below = dict.fromkeys(times, 0.0)
    cells = []
    for one in ordered:
        upto = dict(zip(one.seconds, one.values, strict=True))
        cells.append([max(0.0, upto.get(at, below[at]) - below[at]) for at in times])
        below = {at: upto.get(at, below[at]) for at in times}
    most = max((cell for row in cells for cell in row), default=0.0) or 1.0  # without traffic, the lightest colour
    seconds = [at - began for at in times]
    mesh = axes.pcolormesh(seconds, range(len(cells)), cells, cmap="Oranges", shading="nearest", vmin=0, vmax=most)
    axes.set_yticks(range(len(ordered)), [f"≤ {float(one.labels['le']):g}" for one in ordered])
    axes.figure.colorbar(mesh, ax=axes, pad=0.01).ax.tick_params(labelsize=6)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draw a dashboard from a Prometheus.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD)
    parser.add_argument(
        "--out", type=Path, default=Path("stages.png"), help="a picture, or a page that ends with .html"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how far back")
    parser.add_argument("--rate-interval", type=float, default=60.0, help="$__rate_interval, in seconds")
    parser.add_argument("--note", default="", help="a word behind the title")
    given = parser.parse_args(arguments)
    dashboard = json.loads(given.dashboard.read_text(encoding="utf-8"))
    end = datetime.now(timezone.utc).timestamp()
    span = given.minutes * 60
    window = Window(end - span, end, max(1.0, span / 300), given.rate_interval)
    shown = {
        panel["id"]: [one for found in series_of(panel, dashboard, given.prometheus, window) for one in found]
        for panel in panels(dashboard)
    }
    if given.out.suffix == ".html":
        given.out.write_text(page(dashboard, shown, given.note), encoding="utf-8")
    else:
        draw(dashboard, shown, given.out, given.note)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
