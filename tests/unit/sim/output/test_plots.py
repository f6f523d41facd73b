"""Check the labels of the axes in plots of studies."""

import pytest

from vllm_omni_sched.sim.output import style
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


def test_ours_and_stock_have_their_colours_in_every_picture() -> None:
    teal, red, blue, brown, *_ = style.COLOURS
    assert style.colours_of(["stock as shipped", "stock at its best", "split", "ours at its best"]) == {
        "stock as shipped": red,
        "stock at its best": blue,
        "split": brown,
        "ours at its best": teal,
    }
    assert style.colours_of(["a", "b"]) == {"a": teal, "b": red}
    many = style.colours_of([f"v{at}" for at in range(len(style.COLOURS) + 2)])
    assert len(many) == len(style.COLOURS) + 2
