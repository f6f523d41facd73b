"""Files with options of the stage scheduler."""

from pathlib import Path


def deploy(folder: Path, text: str, name: str = "deploy.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path
