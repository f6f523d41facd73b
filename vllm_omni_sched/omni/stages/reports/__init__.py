"""Facts of the stages' processes, on their way to the metrics and to the detection of anomalies."""
