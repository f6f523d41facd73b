"""Write the results of runs: numbers with their provenance, plots, traces."""
