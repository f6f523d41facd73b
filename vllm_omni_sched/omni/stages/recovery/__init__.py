"""Recovery of a pipeline: dead, hanging and restarted replicas, and what becomes of their requests."""
