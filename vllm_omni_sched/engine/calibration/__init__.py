"""What work costs on the engine that runs here: designed loads, and the times that come back."""
