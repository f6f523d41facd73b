"""What makes vLLM's CPU packages work from the package registry alone. For `dev/bootstrap.py`; not part of the wheel."""
