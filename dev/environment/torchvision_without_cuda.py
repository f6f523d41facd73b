"""Let a CUDA build of torchvision import on CPU torch.

The package registry has torchvision only as a CUDA build. Its compiled library does not load on CPU torch, which by
itself is harmless (vLLM's models use its image transforms, and those are plain torch), but `import torchvision` then
stops at two operators nobody declared. This module declares them just before torchvision is first imported.

`dev/bootstrap.py` copies it into the virtual environments of the development set-up, next to a `.pth` file that loads
it at interpreter start, so that vLLM's child processes have it too. It is no part of the wheel. It costs nothing until
torchvision is imported, and imports torch only then.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own would have to be imported, and this runs at the start of every interpreter
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperatorsFirst:
    """A finder that finds nothing: it only gets to act before torchvision is looked up."""

    library: Any = None  # kept here: torch takes the operators back when the library object dies

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(cls)
            from importlib.metadata import version

            if "+cpu" not in version("torchvision"):  # a CPU build declares its operators itself
                import torch

                cls.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    cls.library.define(operator + _SCHEMA)


if _DeclareOperatorsFirst not in sys.meta_path:
    sys.meta_path.insert(0, _DeclareOperatorsFirst)
