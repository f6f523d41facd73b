"""The development set-up: virtual environments, tiny models, `make serve` and `make test`. Not part of the wheel."""
