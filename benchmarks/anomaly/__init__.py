"""How often is each detector of anomalies wrong while the load changes, and how soon does it see a fault? Simulated."""
