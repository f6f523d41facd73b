"""Stages with their replicas: who goes where, who waits, what breaks, and how many replicas there are."""
