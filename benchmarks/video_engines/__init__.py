"""How far does one video spread over 1 to 56 decoding engines? A model: the real plan and sharing, simulated time."""
