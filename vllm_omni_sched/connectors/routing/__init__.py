"""The choice of a message's path, by topology, size, health and measured cost, and of compression for it."""

from vllm_omni_sched.connectors.routing.options import RoutingOptions
from vllm_omni_sched.connectors.routing.path import RoutedPath, Way
from vllm_omni_sched.connectors.routing.presence import Presence

__all__ = ["Presence", "RoutedPath", "RoutingOptions", "Way"]
