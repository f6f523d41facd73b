"""Define and read all options, and the errors that this package raises. Imports neither vLLM nor torch."""
