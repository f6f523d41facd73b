"""Arrivals of the services that ServeGen describes: all clients of a category together, in windows of ten minutes.

`servegen.json` beside this module has them. Its numbers are sums over the clients' published rates; it has no request.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from benchmarks.forecast.patterns import Series
from benchmarks.serve.derive import servegen_rates

FILE = Path(__file__).with_name("servegen.json")
SOURCE = "ServeGen (arXiv 2505.09999), github.com/alibaba/ServeGen: rates of all clients of a category, summed"
LICENCE = "Apache-2.0"
WINDOW_SECONDS = 600.0
DAY_BINS = round(86_400 / WINDOW_SECONDS)
CATEGORIES = ("language/m-large", "language/m-mid", "language/m-small", "multimodal/mm-image", "reason/deepseek-r1")


def read_arrivals(path: Path = FILE) -> dict[str, Series]:
    """Return the arrivals per window by category."""
    body = json.loads(path.read_text())
    return {name: np.asarray(counts, dtype=np.float64) for name, counts in body["arrivals"].items()}


def derive(data: Path, out: Path = FILE) -> Path:
    """Write the arrivals of ServeGen's folder ``data``.

    Raises:
        SystemExit: a category is not in the folder.
    """
    arrivals = {}
    for category in CATEGORIES:
        files = [one for one in (data / category).glob("*") if re.fullmatch(r"chunk-\d+-trace.csv", one.name)]
        if not files:
            raise SystemExit(f"{data / category} has no chunk-N-trace.csv: name the folder `data` of ServeGen")
        total = np.sum([[rate for _, rate, _ in servegen_rates(file)] for file in files], axis=0)
        arrivals[category] = [round(count) for count in total * WINDOW_SECONDS]
    head = {"source": SOURCE, "licence": LICENCE, "window_seconds": WINDOW_SECONDS}
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    series = ",\n".join(f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in arrivals.items())
    out.write_text("{\n" + "".join(lines) + ' "arrivals": {\n' + series + "\n }\n}\n")
    return out
