"""Many runs of one scenario: variants, sweeps, searches, seeds."""

from vllm_omni_sched.sim.study.evaluate import Finding, evaluate
from vllm_omni_sched.sim.study.options import Ablation, Search, StudyOptions, Variant
from vllm_omni_sched.sim.study.plan import Point, Study, load_study
from vllm_omni_sched.sim.study.running import run_study
from vllm_omni_sched.sim.study.spread import spread

__all__ = [
    "Ablation",
    "Finding",
    "Point",
    "Search",
    "Study",
    "StudyOptions",
    "Variant",
    "evaluate",
    "load_study",
    "run_study",
    "spread",
]
