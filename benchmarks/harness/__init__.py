"""What every benchmark shares: summaries of samples, provenance of a result file, the look of a picture."""
