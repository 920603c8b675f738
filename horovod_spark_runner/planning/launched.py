"""What launches of ranks have measured. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from .figures import RankFigures, Shared


@dataclass(frozen=True)
class Launched:
    """What one launch has measured.

    Attributes:
        ranks: what each rank has.
        hosts: the host of each.
        seconds: of the launch, without what the ranks did.
    """

    ranks: tuple[RankFigures, ...]
    hosts: tuple[str, ...]
    seconds: float

    @property
    def here(self) -> int:
        """Ranks on the fullest host."""
        return max(Counter(self.hosts).values())


@dataclass(frozen=True)
class Crowded:
    """What one launch of ranks that share cores has measured.

    Attributes:
        ranks: what each rank has.
        hosts: the host of each.
    """

    ranks: tuple[Shared, ...]
    hosts: tuple[str, ...]

    @property
    def per_core(self) -> float:
        """Ranks per core; 1 where all came to hosts alone."""
        shared = [rank.per_core for rank in self.ranks if rank.per_core > 1]
        return statistics.fmean(shared or [1.0])

    @property
    def seconds(self) -> float:
        """Of a step of those that shared a core; one that had its own tells nothing."""
        return statistics.fmean(rank.seconds for rank in self.ranks if rank.per_core > 1)

    @property
    def reader_cpu_seconds(self) -> float:
        """Processor time in which those read a row."""
        return statistics.fmean(rank.reader_cpu_seconds for rank in self.ranks if rank.per_core > 1)
