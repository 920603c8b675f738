"""The plan that the driver sends to every slot of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...config.launch import LaunchSettings

# Larger results go to the driver directly: Spark holds them in the memory of its JVM, and together
# they may not exceed spark.driver.maxResultSize (1 GiB unless set).
RESULT_BYTES = 8 * 1024 * 1024
ALL_RESULTS_BYTES = 256 * 1024 * 1024

# Seconds between a slot's signs of life.
HEARTBEAT_SECONDS = 5.0
# How long ranks may go on, to save what they have, after their executor has ended.
ORPHAN_GRACE = 30.0


@dataclass(frozen=True)
class SlotPlan:
    """What a slot needs to begin; travels in Spark's description of its task.

    Attributes:
        run_id: short name of the run.
        key: secret of the run's control messages.
        driver: address of the driver's control server.
        options: see `LaunchSettings`.
        workers: ranks of the run.
        slots: barrier tasks of the run.
        payload: pickled ``(function, args, kwargs)``; ``None`` to fetch it from the driver.
        payload_bytes: its size.
        modules: modules the workers import while the ranks find each other.
        rank_timeout: seconds mpirun may take to start the ranks.
    """

    run_id: str
    key: bytes = field(repr=False)
    driver: tuple[str, int]
    options: LaunchSettings
    workers: int
    slots: int
    payload: bytes | None = field(repr=False)
    payload_bytes: int
    modules: tuple[str, ...] = ()
    rank_timeout: float = 120.0

    @property
    def ranks_per_slot(self) -> int:
        return self.workers // self.slots

    @property
    def most_result_bytes(self) -> int:
        """How large a rank's result may be to go through Spark, which holds all of them at once."""
        return min(RESULT_BYTES, ALL_RESULTS_BYTES // self.workers)
