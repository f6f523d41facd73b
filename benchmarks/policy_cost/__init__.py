"""What one decision of each policy costs while up to 10,000 requests wait."""

BAR_MICROSECONDS = 50.0  # for one decision, at the largest size
