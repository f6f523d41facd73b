"""Does the load forecast beat saying "as now" or "as yesterday"? Made-up arrivals by published statistics."""
