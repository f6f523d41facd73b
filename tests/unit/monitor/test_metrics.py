"""The registry of metrics: complete, well named, and rendered as Prometheus text that reads back the same."""

import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import vllm_omni_sched
from vllm_omni_sched.monitor.counts import Histogram, SchedulerMetrics
from vllm_omni_sched.monitor.exposition import merge, render, values_of
from vllm_omni_sched.monitor.metrics import EACH, METRICS, PREFIX


def samples(page: str) -> dict[tuple[str, frozenset], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_every_attribute_is_published_exactly_once():
    published = [attribute for metric in METRICS for attribute in metric.fields.values()]
    assert sorted(published) == sorted(field.name for field in dataclasses.fields(SchedulerMetrics))


def test_every_attribute_is_counted_by_the_engine():
    """A metric that nobody counts would read 0 for ever and mislead whoever looks at it."""
    package = Path(vllm_omni_sched.__file__).parent
    meters = [package / "monitor" / f"{name}.py" for name in ("slo", "waiting_counts")]
    counting = (*package.glob("engine/**/*.py"), *package.glob("core/engine/*.py"), *meters)
    engine = "".join(path.read_text() for path in counting)
    attributes = [field.name for field in dataclasses.fields(SchedulerMetrics)]
    assert [
        name for name in attributes if not re.search(rf"metrics\.{name}(\[[^=]+\])?(\.observe\(| [+-]?= )", engine)
    ] == []


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric):
    assert re.fullmatch(r"[a-z][a-z_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    for _, counted in values_of(metric, SchedulerMetrics()):
        assert (metric.kind == "histogram") == isinstance(counted, Histogram)
    if metric.kind == "histogram":
        assert metric.name.endswith(("_seconds", "_bytes", "_requests"))
    assert (metric.label is None) == (list(metric.fields) == [""])
    assert metric.help.endswith(".")


def test_a_page_holds_every_metric_with_its_value():
    metrics = SchedulerMetrics()
    expected = {}
    for value, metric in enumerate(METRICS, start=1):
        if metric.kind == "histogram":
            continue
        for label_value, attribute in metric.fields.items():
            number = 10 * value + len(expected)
            if label_value == EACH:
                label_value = next(iter(getattr(metrics, attribute)))
                getattr(metrics, attribute)[label_value] = number
            else:
                setattr(metrics, attribute, number)
            labels = frozenset({(metric.label, label_value)} if metric.label else ())
            expected[metric.full_name, labels] = float(number)

    read = samples(render(metrics).decode())
    assert {key: read[key] for key in expected} == expected


def test_a_metric_that_is_not_counted_is_not_on_the_page():
    metrics = SchedulerMetrics()
    metrics.waiting_requests.clear()
    assert "waiting_requests" in render(SchedulerMetrics()).decode()
    assert "waiting_requests" not in render(metrics).decode()


def test_histogram_bounds_are_inclusive_and_cumulative():
    metrics = SchedulerMetrics()
    first, second = metrics.schedule_seconds.bounds[:2]
    for value in (0.0, first, first + 1e-6, second, 1e12):
        metrics.schedule_seconds.observe(value)

    read = samples(render(metrics).decode())
    name = f"{PREFIX}schedule_seconds"
    assert read[f"{name}_bucket", frozenset({("le", str(first))})] == 2
    assert read[f"{name}_bucket", frozenset({("le", str(second))})] == 4
    assert read[f"{name}_bucket", frozenset({("le", "+Inf")})] == 5
    assert read[f"{name}_count", frozenset()] == 5
    assert read[f"{name}_sum", frozenset()] == 2 * first + 1e-6 + second + 1e12


def test_merge_labels_engines_and_sums_what_agrees():
    one, two = SchedulerMetrics(steps=3, sessions=1), SchedulerMetrics(steps=5, sessions=2)
    pages = [render(one).decode(), render(two).decode()]

    apart = merge(zip([{"engine": "0"}, {"engine": "1"}], pages, strict=True))
    steps = next(family for family in apart if family.name == f"{PREFIX}steps")
    assert [(s.name, s.labels, s.value) for s in steps.samples] == [
        (f"{PREFIX}steps_total", {"engine": "0"}, 3.0),
        (f"{PREFIX}steps_total", {"engine": "1"}, 5.0),
    ]
    assert len({family.name for family in apart}) == len(apart) == len(METRICS)

    together = merge(({"engine": "0"}, page) for page in pages)
    sums = {family.name: family.samples[0].value for family in together}
    assert sums[f"{PREFIX}steps"] == 8
    assert sums[f"{PREFIX}sessions"] == 3


def test_merge_leaves_strangers_out_and_refuses_nonsense():
    assert merge([({}, "# TYPE somebody_else counter\nsomebody_else_total 1\n")]) == []
    with pytest.raises(ValueError, match="could not convert string to float"):
        merge([({}, f"{PREFIX}steps_total not-a-number\n")])
