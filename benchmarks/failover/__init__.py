"""Measure how soon a replica serves again after a fault, and whether all requests are answered."""

from __future__ import annotations
