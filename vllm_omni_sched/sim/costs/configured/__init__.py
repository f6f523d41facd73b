"""Read shapes of models from the fields of a ``config.json``: decoders by family, towers, formats of weights."""
