"""Reasons why an encoding that was made before is not used for an item."""

from enum import Enum


class NotReused(str, Enum):
    """Reason why an item is encoded anew though an encoding is kept, or why its encoding is not kept."""

    OTHER_CONTENT = "other_content"  # another item has the same name
    UNKNOWN_CONTENT = "unknown_content"  # the engine core cannot read the item's data
    OTHER_LAYOUT = "other_layout"  # not the item's number of embeddings, or not the model's hidden size and dtype
    UNKNOWN_LAYOUT = "unknown_layout"  # the model's hidden size is not known before an item was encoded here
