"""Define a scenario: a TOML file, typed, and checked before anything runs."""
