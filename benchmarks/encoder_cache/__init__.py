"""Which encodings stay: traces with reuse, replayed on the cache managers by age, by worth, with a host tier."""

VARIANTS = {
    "stock": "vLLM's EncoderCacheManager",
    "age": "WorthEncoderCacheManager, order age",
    "worth": "order worth, costs not measured",
    "worth, measured": "order worth, costs measured",
    "worth + host": "order worth, costs measured, host tier",
}
