"""Alert rules ask for metrics that exist, fire where they should alone, and each has its entry in the runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.metric_names import NAME, OF_SCRAPES, all_metrics, base_names, labels_asked
from tests.support.prometheus import tool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
TESTS = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
KNOWN = all_metrics()
SELECTED = re.compile(r"(vllm:\w+)\{([^}]*)\}")
OF_PROMETHEUS = re.compile(r"\bup\{")
RUNBOOK = "https://example.org/team/vllm-omni-sched/blob/main/docs/runbook.md"
VALUES = re.compile(r'(\w+)=~?"([^"]*)"')

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
needs_promtool = pytest.mark.skipif(tool("promtool") is None, reason="no promtool: put `promtool` on PATH")


@each_rule
def test_rules_use_only_metrics_that_exist_with_the_labels_they_have(rule: dict[str, Any]) -> None:
    used = base_names(rule["expr"], KNOWN)
    assert used or OF_PROMETHEUS.search(rule["expr"])
    assert used <= set(KNOWN)
    assert labels_asked(rule["expr"]) <= set.union(OF_SCRAPES, *(set(KNOWN[name].labels) for name in used))
    for name, selection in SELECTED.findall(rule["expr"]):
        for label, values in VALUES.findall(selection):
            known = KNOWN[name].labels[label]
            assert known is None or set(values.split("|")) <= known, (label, values)


@each_rule
def test_counters_are_asked_for_their_growth(rule: dict[str, Any]) -> None:
    for name in NAME.findall(rule["expr"]):
        if KNOWN.get(name, KNOWN.get(re.sub(r"_bucket$", "", name))).kind == "gauge":
            assert not re.search(rf"(rate|increase)\({name}", rule["expr"])
        else:
            assert re.search(
                rf"((rate|increase)\(|offset|unless |unless on \(instance\) \(){name}|{name} offset", rule["expr"]
            )


@each_rule
def test_an_alert_says_what_it_is_about(rule: dict[str, Any]) -> None:
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    text = rule["annotations"]
    assert set(text) == {"runbook_url", "summary", "description"}
    assert text["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"  # the anchor of its heading
    assert text["description"].endswith(".")
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in group.split(",")}
    grouped |= {"instance"} if OF_PROMETHEUS.match(rule["expr"]) else set()
    assert set(re.findall(r"\$labels\.(\w+)", str(text))) <= grouped - {"le"}


def test_the_runbook_has_every_alert_and_no_other() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    entries = dict(re.findall(r"^### (OmniSched\w+)\n\n(.+?)(?=\n\n##|\Z)", runbook, re.MULTILINE | re.DOTALL))
    assert [*entries] == [rule["alert"] for rule in RULES]
    for alert, entry in entries.items():
        assert re.search(r"^\*Meaning\.\* ", entry, re.MULTILINE), alert
        assert re.search(r"^\*Do\.\* ", entry, re.MULTILINE), alert


def test_every_alert_is_tested_where_it_fires_and_where_it_does_not() -> None:
    cases = [f"{rule['alert']} {does}" for rule in RULES for does in ("fires", "does not fire")]
    assert [test["name"] for test in TESTS] == cases
    for test in TESTS:
        (asked,) = test["promql_expr_test"]
        assert f'alertname="{test["name"].split()[0]}"' in asked["expr"]
        assert bool(asked["exp_samples"]) is test["name"].endswith(" fires")


def test_series_of_tests_are_those_that_servers_have() -> None:
    for test in TESTS:
        for series in (series["series"] for series in test["input_series"]):
            if series.startswith("up{"):
                continue
            (name,) = base_names(series, KNOWN)
            labels = dict(VALUES.findall(series))
            assert set(labels) - OF_SCRAPES - {"engine"} == set(KNOWN[name].labels) - {"engine"}, series
            for label, value in labels.items():
                assert value in (KNOWN[name].labels.get(label) or {value}), series


@needs_promtool
@pytest.mark.parametrize("what", [("check", "alerts.yaml"), ("test", "alerts_test.yaml")], ids=lambda what: what[0])
def test_promtool_agrees(what: tuple[str, str]) -> None:
    command, file = what
    done = subprocess.run(
        [tool("promtool"), command, "rules", FOLDER / file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
