"""In a pipeline that runs: what does the scheduler over stages gain against vLLM-Omni alone, and what does it cost?"""

from __future__ import annotations

STOCK, OURS = "stock", "ours"
VARIANTS = (STOCK, OURS)
