"""Measure how pictures that arrive together stall the front end, and how fast they are answered."""

STOCK, SERVERS, OURS = "stock", "stock, 2 API servers", "ours"

VARIANTS = (STOCK, SERVERS, OURS)
