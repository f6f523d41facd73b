"""Compare the load forecast with "as now" and "as yesterday", on synthetic arrivals with published statistics."""
