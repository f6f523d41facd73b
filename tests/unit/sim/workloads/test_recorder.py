"""Two looks at the metrics of a server make an interval."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.vllm_page import page
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.recorder import Recorder, read_metrics
from vllm_omni_sched.sim.workloads.trace import Tokens


def looks(*pages):
    """Return the intervals of a server that had these pages, 10 s apart."""
    first, *later = [read_metrics(one) for one in pages]
    recorder = Recorder(first, 100.0)
    return [recorder.interval(one, 110.0 + 10 * n) for n, one in enumerate(later)]


def test_deltas_are_what_happened():
    before = page(finished={"stop": 10, "length": 2}, prompts=[50] * 12, outputs=[5] * 12, items=7)
    after = page(
        finished={"stop": 12, "length": 3},
        prompts=[50] * 12 + [50, 60, 5000],
        outputs=[5] * 12 + [1, 2, 30],
        items=11,
        running=4,
        waiting=2,
        classes={"batch": 1, "interactive": 2},
    )
    (found,) = looks(before, after)
    assert (found.at, found.seconds) == (0.0, 10.0)
    assert (found.finished, found.arrivals) == (3, 9)
    assert (found.running, found.waiting, found.restarted) == (4, 2, False)
    assert found.prompt_tokens == Tokens(((20, 0), (50, 1), (100, 1), (2000, 0), (None, 1)), 5110.0)
    assert found.generation_tokens == Tokens(((1, 1), (2, 1), (20, 0), (50, 1)), 33.0)
    assert found.items == {"unknown": 4}
    assert found.classes == {"batch": 1, "interactive": 2}


def test_engines_are_summed():
    text = page(finished={"stop": 4}, prompts=[5] * 4, running=1)
    both = text + text.replace('engine="0"', 'engine="1"')
    (found,) = looks(page(), both)
    assert (found.finished, found.running, found.prompt_tokens.requests) == (8, 2, 8)


def test_nothing_happened_is_an_interval_too():
    text = page(finished={"stop": 3}, prompts=[5] * 3, outputs=[5] * 3, running=2)
    (found,) = looks(text, text)
    assert (found.arrivals, found.finished, found.prompt_tokens, found.items) == (0, 0, Tokens(), {})


def test_arrivals_sum_up_though_gauges_are_a_little_late():
    found = looks(
        page(running=5),
        page(running=2, finished={"stop": 1}),  # two finished ones are not counted yet
        page(running=2, finished={"stop": 4}),
    )
    assert [one.arrivals for one in found] == [0, 1]
    assert sum(one.arrivals for one in found) == 4 + 2 - 5


@pytest.mark.parametrize(
    "after",
    [
        page(finished={"stop": 3}, prompts=[5, 5, 700], running=1),  # fewer than before
        page(
            finished={"stop": 30}, prompts=[5, 5, 700] + [9] * 27, running=1, started=200.0
        ),  # more, of another process
    ],
)
def test_a_restart_is_marked_and_counts_from_zero(after):
    before = page(finished={"stop": 20}, prompts=[9] * 20, running=8)
    (found,) = looks(before, after)
    assert found.restarted
    assert found.finished == found.prompt_tokens.requests == read_metrics(after).values["vllm:request_success_total"]
    assert found.arrivals == found.finished + 1


def test_after_a_restart_all_goes_on():
    old, new = page(finished={"stop": 20}, running=8), page(finished={"stop": 3}, running=1, started=200.0)
    found = looks(old, new, page(finished={"stop": 5}, started=200.0))
    assert [(one.restarted, one.finished, one.arrivals) for one in found] == [(True, 3, 4), (False, 2, 1)]


def test_intervals_follow_each_other_without_gaps():
    recorder = Recorder(read_metrics(page()), 3.3333)
    found = [recorder.interval(read_metrics(page()), now) for now in (3.99994, 5.12346, 17.0)]
    for one, other in pairwise(found):
        assert one.at + one.seconds == pytest.approx(other.at, abs=1e-9)
    with pytest.raises(ValueError, match="is not later"):
        recorder.interval(read_metrics(page()), 17.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html>nothing here</html>", "not metrics in the text format|not the metrics of a vLLM server"),
        ("", "not the metrics of a vLLM server: vllm:request_success_total is missing"),
        ("process_cpu_seconds_total 3\n", "not the metrics of a vLLM server"),
        ("vllm:request_success_total x\n", "not metrics in the text format"),
    ],
)
def test_other_pages_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        read_metrics(text)


def test_names_are_those_of_vllm():
    """Without importing it, which takes long."""
    from importlib.util import find_spec

    (folder,) = find_spec("vllm").submodule_search_locations
    source = Path(folder, "v1", "metrics", "loggers.py").read_text()
    found = read_metrics(page())
    names = {name.removesuffix("_total").removesuffix("_sum") for name in found.values if name.startswith("vllm:")}
    assert len(names) == 7
    assert [name for name in names if f'name="{name}"' not in source] == []
