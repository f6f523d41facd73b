"""Run many simulations of one scenario: variants, sweeps, searches, seeds."""
