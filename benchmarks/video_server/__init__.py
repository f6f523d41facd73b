"""When videos arrive together, how long until each has its first token?"""

STOCK, OURS = "stock", "ours"

MEDIA = {STOCK: {}, OURS: {"video_backend": "omni_flashcodec"}}
"""What ``--media-io-kwargs`` says of videos; all else is the same, the scheduler too."""
