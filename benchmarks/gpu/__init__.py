"""Measure in ten minutes what this GPU would change in the defaults. All parts need torch alone, but for vLLM's."""
