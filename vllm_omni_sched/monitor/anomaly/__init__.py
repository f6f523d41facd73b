"""Detect anomalies from observations: hanging requests and replicas, memory leaks, stuck queues, sick edges."""

from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.anomaly.memory_leak import MemoryLeak
from vllm_omni_sched.monitor.anomaly.sick_edge import SickEdge
from vllm_omni_sched.monitor.anomaly.silence import Silence
from vllm_omni_sched.monitor.anomaly.stage_timeout import StageTimeout
from vllm_omni_sched.monitor.anomaly.stuck_queue import StuckQueue

__all__ = ["Anomaly", "AnomalyKind", "MemoryLeak", "SickEdge", "Silence", "StageTimeout", "StuckQueue"]
