"""Forecast the load by modality, and plan the replicas for it."""
