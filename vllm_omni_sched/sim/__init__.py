"""The same policies on a cluster nobody has to own: a discrete-event simulator."""
