"""Is the first request with an image slower than the tenth? Each round starts the engine anew."""

VARIANTS = {
    "stock": "no plugin",
    "ours": "encode_ahead and waiting_order",
}
