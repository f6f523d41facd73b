"""Simulate each anomaly detector: how often is it wrong while the load changes, and how soon does it see a fault?"""
