"""Print the alert rules as a resource of the Prometheus operator: ``python deploy/prometheus/as_resource.py``.

``VLLM_OMNI_SCHED_URL``, the address of the repository, takes the place of the example in the links to the runbook.
"""

import json
import os
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parent / "alerts.yaml"
EXAMPLE = "https://example.org/team/vllm-omni-sched"


def resource() -> dict[str, Any]:
    """Return the PrometheusRule; `kubectl apply -f -` takes it as JSON."""
    rules = RULES.read_text(encoding="utf-8")
    address = os.environ.get("VLLM_OMNI_SCHED_URL", "").rstrip("/") or EXAMPLE
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "vllm-omni-sched", "labels": {"app.kubernetes.io/name": "vllm-omni-sched"}},
        "spec": yaml.safe_load(rules.replace(EXAMPLE, address)),
    }


if __name__ == "__main__":
    print(json.dumps(resource(), indent=2))
