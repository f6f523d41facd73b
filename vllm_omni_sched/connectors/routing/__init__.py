"""Choice of a message's transport, by distance and health, and of its compression."""

from vllm_omni_sched.connectors.routing.presence import Presence
from vllm_omni_sched.connectors.routing.transport import RoutedTransport, RoutingOptions, Way

__all__ = ["Presence", "RoutedTransport", "RoutingOptions", "Way"]
