"""For tests of code that trains: one rank in the test's own process, and faults."""

from __future__ import annotations

from .faults import Fault, Faults, with_faults
from .one_rank import one_rank_here

__all__ = ["Fault", "Faults", "one_rank_here", "with_faults"]
