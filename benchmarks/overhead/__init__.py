"""What the plugin costs who serves text only: the real engine without it, with it installed, with the flag given."""

VARIANTS = {
    "stock": "no plugin",
    "installed": "plugin, no flag",
    "ours": "--scheduler-cls",
}
