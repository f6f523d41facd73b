"""Measure how long planning for an hour of requests takes on one core, what it simulates, and what it finds.

The bar is five minutes for an hour in Mooncake's format, over all kinds of GPUs.
"""

BAR_SECONDS = 300.0
