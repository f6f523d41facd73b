"""Which path a message takes: by topology, size, health and measured cost; and whether it is compressed for it."""

from vllm_omni_sched.connectors.routing.options import RoutingOptions
from vllm_omni_sched.connectors.routing.path import RoutedPath, Way
from vllm_omni_sched.connectors.routing.presence import Presence

__all__ = ["Presence", "RoutedPath", "RoutingOptions", "Way"]
