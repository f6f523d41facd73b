"""What makes vLLM's CPU packages work from the package registry alone. Used by `dev/bootstrap.py`, not shipped."""
