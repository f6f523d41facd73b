"""Print the alert rules as a resource of the Prometheus operator: ``python deploy/prometheus/as_resource.py``."""

import json
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parent / "alerts.yaml"


def resource() -> dict[str, Any]:
    """Return the PrometheusRule; `kubectl apply -f -` takes it as JSON."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "vllm-omni-sched", "labels": {"app.kubernetes.io/name": "vllm-omni-sched"}},
        "spec": yaml.safe_load(RULES.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    print(json.dumps(resource(), indent=2))
