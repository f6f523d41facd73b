"""How long planning for an hour of requests takes on one core, and what it simulates and finds.

The bar is five minutes for an hour in Mooncake's format, over all kinds of GPUs.
"""

BAR_SECONDS = 300.0
