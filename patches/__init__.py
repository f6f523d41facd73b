"""Improvements to released vLLMs as patches, one folder per version; `python patches/check.py` checks them."""
