"""What is wrong, by observations alone: requests or replicas that hang, leaks, queues that stand, sick edges."""

from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.anomaly.memory_leak import MemoryLeak
from vllm_omni_sched.monitor.anomaly.sick_edge import SickEdge
from vllm_omni_sched.monitor.anomaly.silence import Silence
from vllm_omni_sched.monitor.anomaly.stage_timeout import StageTimeout
from vllm_omni_sched.monitor.anomaly.stuck_queue import StuckQueue

__all__ = ["Anomaly", "AnomalyKind", "MemoryLeak", "SickEdge", "Silence", "StageTimeout", "StuckQueue"]
