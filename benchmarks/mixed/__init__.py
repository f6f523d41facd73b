"""Text, images and frames on one engine, arriving as they like: do tokens go on while pictures are encoded?"""

VARIANTS = {
    "stock": "no plugin",
    "ours": "encode_ahead",
}
