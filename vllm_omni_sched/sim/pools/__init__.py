"""Simulate stages with their replicas: dispatch, queues, failures, and scaling."""
