"""Check the labels of the axes in plots of studies."""

import pytest

from vllm_omni_sched.sim.output.plots import searched_label
from vllm_omni_sched.sim.study.options import Search


@pytest.mark.parametrize(
    ("search", "label"),
    [
        ({"kind": "max_rate"}, "largest rate within the SLO, requests per second"),
        ({"kind": "max_rate", "key": "workload.concurrency"}, "largest workload.concurrency within the SLO"),
        ({"kind": "tightest_slo"}, "smallest factor on the SLO's times that is met"),
    ],
)
def test_the_label_of_a_search_names_what_was_searched(search: dict[str, str], label: str) -> None:
    assert searched_label(Search.model_validate(search)) == label
