"""Imported last by the server that stages are forked from: it makes them short.

What is there by then, no collection of garbage looks at again: vLLM-Omni collects several times while a stage starts,
and when it ends, and that would copy every page the stage shares with the server, a gigabyte each. And a stage looks at
its model's class itself.
"""

from __future__ import annotations

from setproctitle import getproctitle

from dev.frozen_heap import freeze_for_good
from dev.model_registry import look_at_models_here

getproctitle()  # it finds the place of titles from the environment, which stages replace
look_at_models_here()
freeze_for_good()
