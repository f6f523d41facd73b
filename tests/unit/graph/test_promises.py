"""What a request says about itself: what is read, and what is refused with which words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.graph.order import INTERACTIVE, REALTIME
from vllm_omni_sched.graph.promises import KNOWN, Promises, promises_of, usual_class


def promises(**options: Any) -> Promises:
    return promises_of(load_config({"omni_sched": options}))


@pytest.mark.parametrize(
    "extra",
    [
        None,
        {},
        "nonsense of somebody else",
        {"session_id": "omni_clas", "top_n_sigma": -1, "Omni_class": 1, 3: 4},
        {"omni_class": "batch"},
        {"omni_class": "interactive", "omni_ttft_ms": 800, "omni_itl_ms": 60.5},
        {"omni_ttft_ms": 300, "omni_itl_ms": 50},  # what sessions are promised, exactly
        {"omni_user": "anna"},
        {"omni_user": 7},
    ],
)
def test_what_makes_sense_passes(extra: Any) -> None:
    promises().check(extra)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"omni_class": "vip"}, "omni_class is 'vip', which is not an SLA class: it must be one of interactive, batch"),
        ({"omni_class": "interactiv"}, r"one of interactive, batch; did you mean 'interactive'\?"),
        ({"omni_class": ["batch"]}, r"omni_class is \['batch'\], which is not an SLA class"),
        ({"omni_class": None}, "omni_class is None, which is not an SLA class"),
        ({"omni_class": "x" * 5000}, r"omni_class is 'x{10,64}\.\.\., which"),
        ({"omni_class": "realtime"}, r"clients of this server may not ask for \(option 'client_classes'\): it must be"),
        ({"omni_ttft_ms": "fast"}, "omni_ttft_ms must be a number of milliseconds above 0, got 'fast'"),
        ({"omni_ttft_ms": -5}, "got -5"),
        ({"omni_ttft_ms": 0}, "got 0"),
        ({"omni_ttft_ms": True}, "got True"),
        ({"omni_itl_ms": math.nan}, "omni_itl_ms must be .* got nan"),
        ({"omni_itl_ms": math.inf}, "got inf"),
        ({"omni_itl_ms": 10**400}, "omni_itl_ms must be a number of milliseconds"),
        ({"omni_itl_ms": [60]}, r"got \[60\]"),
        ({"omni_ttft_ms": 299}, r"omni_ttft_ms must be 300 or more on this server \(option 'client_ttft_ms_min'\)"),
        ({"omni_itl_ms": 1e-9}, r"omni_itl_ms must be 50 or more on this server \(option 'client_itl_ms_min'\)"),
        ({"omni_clas": "batch"}, r"unknown key 'omni_clas': did you mean 'omni_class'\? known keys are omni_class, "),
        ({"omni_priority": 1}, "unknown key 'omni_priority': known keys are " + ", ".join(KNOWN)),
        ({"omni_user": ["anna"]}, "omni_user must be text or a whole number"),
    ],
)
def test_what_makes_none_is_refused_with_the_reason(extra: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        promises().check(extra)


def test_the_operator_says_which_classes_clients_may_name() -> None:
    open_to_all = promises(client_classes=["realtime", "batch"])
    open_to_all.check({"omni_class": "realtime"})
    with pytest.raises(RequestError, match=r"'interactive', which clients .* must be one of realtime, batch"):
        open_to_all.check({"omni_class": "interactive"})
    with pytest.raises(RequestError, match=r"'batch', which clients .*: leave it out"):
        promises(client_classes=[]).check({"omni_class": "batch"})


def test_the_operator_bounds_the_targets() -> None:
    promises(client_ttft_ms_min=0, client_itl_ms_min=0).check({"omni_ttft_ms": 0.001, "omni_itl_ms": 0.001})
    bounded = promises(client_ttft_ms_min=1000, realtime_itl_ms=20)
    bounded.check({"omni_ttft_ms": 1000, "omni_itl_ms": 20})
    for extra in ({"omni_ttft_ms": 999}, {"omni_itl_ms": 19}):
        with pytest.raises(RequestError, match="or more on this server"):
            bounded.check(extra)


def test_a_request_is_promised_what_it_says() -> None:
    read = promises()
    assert read.classify({}, INTERACTIVE) == INTERACTIVE
    assert read.classify({"omni_class": "realtime"}, INTERACTIVE) == REALTIME  # allowed or not
    found = read.classify({"omni_class": "batch", "omni_ttft_ms": 800}, INTERACTIVE)
    assert (found.name, found.ttft_seconds, found.itl_seconds) == ("batch", 0.8, math.inf)


def test_sessions_are_realtime_all_else_is_interactive() -> None:
    assert usual_class(promises().classes, session=True) == REALTIME
    assert usual_class(promises().classes, session=False) == INTERACTIVE
