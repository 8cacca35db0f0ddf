"""Stage 1 of A*-PO: the optimal value V* of every prompt, estimated from samples of the reference."""

from rlkit.vstar.estimate import estimate_vstar
from rlkit.vstar.table import ValueTable

__all__ = ["ValueTable", "estimate_vstar"]
