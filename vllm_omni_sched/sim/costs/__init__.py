"""Model the costs of work on a machine, with the source of each number."""
