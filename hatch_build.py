"""Give the archives of a build a description that stands alone."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = "VLLM_OMNI_SCHED_URL"
"""Environment variable with the address of the repository, such as ``https://example.org/team/vllm-omni-sched``."""
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


class Description(MetadataHookInterface):
    """Sets the README as description, and the addresses of the project if ``VLLM_OMNI_SCHED_URL`` names one.

    In a source distribution both were set when it was built, and stay.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        if Path(self.root, "PKG-INFO").is_file():
            return
        address = os.environ.get(ADDRESS, "").rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": standing_alone(text, address, f"v{metadata['version']}"),
        }
        metadata["urls"] = {}
        if address:
            pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
            metadata["urls"] = {"Repository": address, "Issues": f"{address}/issues"}
            metadata["urls"] |= {name: f"{address}/blob/v{metadata['version']}/{page}" for name, page in pages.items()}


def standing_alone(text: str, address: str, tag: str) -> str:
    """Return Markdown that can be read away from the repository: no link in it is relative.

    With an address, links lead to the files of that tag. Without one, a link becomes its text, and a picture goes.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if not address:
            return "" if picture else words
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return RELATIVE_LINK.sub(absolute, text)
