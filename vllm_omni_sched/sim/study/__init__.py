"""Run many simulations of one scenario: variants, sweeps, searches, seeds."""

from vllm_omni_sched.sim.study.evaluate import Finding, evaluate
from vllm_omni_sched.sim.study.options import Ablation, Case, Search, StudyOptions, Tune, Variant
from vllm_omni_sched.sim.study.plan import Point, Study, load_study
from vllm_omni_sched.sim.study.running import run_study
from vllm_omni_sched.sim.study.spread import interval, ratio_interval, spread
from vllm_omni_sched.sim.study.tuning import Tuned, tune

__all__ = [
    "Ablation",
    "Case",
    "Finding",
    "Point",
    "Search",
    "Study",
    "StudyOptions",
    "Tune",
    "Tuned",
    "Variant",
    "evaluate",
    "interval",
    "load_study",
    "ratio_interval",
    "run_study",
    "spread",
    "tune",
]
