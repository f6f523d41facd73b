"""How soon does a replica serve again after a fault, are all requests answered, and what does reading ahead gain?"""

from __future__ import annotations
