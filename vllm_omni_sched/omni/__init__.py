"""vLLM-Omni's side: our connectors as it knows them, and how it gets to know them."""
