"""The adaptive prefill budget, and the line it fits."""

import pytest

from vllm_omni_sched.resource.engine.prefill_budget import AdaptivePrefill, LineFit


def test_prefill_budget_knows_the_line_after_a_few_steps():
    control = AdaptivePrefill(maximum=2048)
    for i in range(60):
        control.observe(0.02 + 2e-5 * control.limit, float(i))
    assert control.limit == pytest.approx(1500, rel=0.05)


def test_one_hiccup_does_not_cost_the_prefill_budget_for_long():
    control = AdaptivePrefill(maximum=2048)
    for i in range(400):
        control.observe(300.0 if i == 250 else 0.02 + 2e-5 * control.limit, float(i))
    assert control.limit == pytest.approx(1500, rel=0.1)


def test_a_slow_step_without_prompts_says_nothing_against_them():
    control = AdaptivePrefill(maximum=2048)
    for i in range(60):
        control.observe(0.02 + 2e-5 * control.limit, float(i))
    before = control.limit
    control.observe(0.06, 60.0, size=0)
    assert control.limit >= 0.8 * before
    control.observe(0.06, 61.0, size=before)
    assert control.limit <= before


@pytest.mark.parametrize("points", [[(0, 1), (10, 3)], [(5, 2), (5, 2), (1, 1.2)]])
def test_line_fit(points):
    fit = LineFit(0.98)
    for _ in range(100):
        for x, y in points:
            fit.add(x, y)
    assert (fit.at_zero, fit.slope) == (pytest.approx(1, rel=0.02), pytest.approx(0.2, rel=0.02))


def test_line_fit_stays_sober_when_nothing_new_comes():
    fit = LineFit(0.9)
    for i in range(10_000):
        fit.add(0.5, 1.0 + 0.01 * (-1) ** i)
    fit.add(0.6, 1.1)
    assert fit.at_zero + 0.5 * fit.slope == pytest.approx(1.0, abs=0.05)


def test_steps_that_only_decode_do_not_make_prompts_look_dear():
    """Most steps of a chat have no prompt; that they take time says nothing about what a token of a prompt costs."""
    control = AdaptivePrefill(0.08, minimum=64, maximum=2048)
    for i in range(400):
        waiting = 577 if i % 20 == 0 else 0
        size = min(control.limit, waiting)
        control.observe(0.012 + 2.5e-5 * size, float(i), size=size)
    assert control.limit >= 577


def test_line_fit_knows_the_slope_however_rare_prompts_are():
    fit = LineFit(0.98)
    for i in range(2000):
        x = 300 if i % 40 == 0 else 0
        fit.add(x, 0.01 + 3e-5 * x)
    assert fit.slope == pytest.approx(3e-5, rel=0.1)
    assert fit.at_zero == pytest.approx(0.01, rel=0.02)
