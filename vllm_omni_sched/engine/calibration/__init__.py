"""Calibration of costs on a running engine: designed loads, and the times they take."""
