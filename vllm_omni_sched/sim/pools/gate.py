"""The gate of a stage: the one place where the simulator asks it."""

from collections.abc import Sequence

from vllm_omni_sched.resource.balance import Dice, ReplicaState
from vllm_omni_sched.resource.stage_gate import GatePlan, GateRequest, GateSnapshot, StageGate


def ask(
    gate: StageGate, now: float, waiting: Sequence[GateRequest], replicas: Sequence[ReplicaState], dice: Dice
) -> GatePlan:
    """Who goes now, and where to; ``waiting``: first to run first."""
    return gate.plan(GateSnapshot(now, tuple(waiting), tuple(replicas)), dice)
