"""One rank inside its slot: its process, its shim, and the outcome it comes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..protocol.outcome import ABORTED, LAUNCH, MPI_ENDED, Failure, RankOutcome
from ..protocol.topology import RankPlacement
from .json_door import Caller
from .rank_process import LargeResult, RankProcess

# How long a rank may go on after the world ended, to tell of its own failure first.
ABORT_GRACE = 2.0
# How long a rank that has told why it failed may take to end: MPI's abort hangs without mpirun.
END_SECONDS = 5.0
# How long the Python stacks of a process take to be written.
STACKS_GRACE = 0.5


class Rank:
    """Brings one rank's process from start to outcome.

    Args:
        process: its worker process.
        on_failure: is told once if the rank fails.
    """

    def __init__(
        self, process: RankProcess, on_failure: Callable[[RankPlacement | None, Failure], None]
    ) -> None:
        self.process = process
        self.placement: RankPlacement | None = None
        self.timings: dict[str, float] = {}
        self.large: LargeResult | None = None
        self.settled = False
        self.begun = False
        self._on_failure = on_failure
        self._result: bytes | None = None
        self._failure: Failure | None = None
        self._shim: Caller | None = None
        self._world_ended: float | None = None
        self._told: tuple[float, Failure] | None = None  # since when it says that it failed

    @property
    def started(self) -> bool:
        """Whether mpirun has started this rank."""
        return self._shim is not None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def outcome(self, slot: int, host: str, timings: Mapping[str, float]) -> RankOutcome:
        return RankOutcome(
            slot=slot,
            host=host,
            placement=self.placement,
            result=self._result,
            result_bytes=0 if self.large is None else self.large.size,
            failure=self._failure,
            timings={**timings, **self.timings},
            ready_bytes=self.process.ready_bytes,
        )

    def begin(self, shim: Caller, environment: Mapping[str, str], size: int) -> None:
        """Join the world of ``size`` ranks with the identity that ``shim`` brought."""
        assert self.placement is not None
        self._shim = shim
        if self.settled:  # it died before mpirun came to it
            shim.release(1)
        else:
            self.process.begin(environment, self.placement.rank, size)

    def check(self, now: float) -> None:
        """Notice what happened since the last call."""
        self.process.check()
        if self.process.ended and not self.settled:
            end = self.process.outcome()
            self.timings.update(end.timings)
            self.large = end.large
            self.settle(end.result, end.failure)
        if self._told is None and not self.settled:
            told = self.process.told_failure()
            self._told = None if told is None else (now, told)
        elif self._told is not None and now - self._told[0] > END_SECONDS:
            self.settle(None, self._told[1])
        if self._shim is not None and self._shim.ended and not self.settled:
            # mpirun ended it, because another rank failed or because it died itself.
            self._world_ended = self._world_ended or now
            if now - self._world_ended > ABORT_GRACE:
                self.abort(ABORTED, "ended because another rank failed")

    def dump_stacks(self) -> None:
        """Have the process write the Python stacks of its threads; see `abort`."""
        if not self.settled:
            self.process.dump_stacks()

    def abort(self, kind: str, message: str, log_tail: tuple[str, ...] = ()) -> None:
        """End the rank now, for the reason given, unless it has told of a failure of its own."""
        if self.settled:
            return
        told = self.process.told_failure()
        if told is not None:  # and could not end: a thread hangs in the kernel, say
            self.settle(None, told)
        else:
            stacks = self.process.stacks()
            self.settle(None, Failure(kind, time.time(), message, None, stacks, None, log_tail))

    def settle(self, result: bytes | None, failure: Failure | None) -> None:
        """Take the rank's outcome, once; its process has ended or is ended."""
        if self.settled:
            return
        self.settled = True
        self._result, self._failure = (result, None) if failure is None else (None, failure)
        self.process.kill()
        if self._shim is not None:
            # Anything but 0 makes mpirun end the other ranks.
            self._shim.release(0 if failure is None else 1)
        if failure is not None:
            self._on_failure(self.placement, failure)

    def explain_abort(self, why: str, log_tail: tuple[str, ...]) -> None:
        """Say what else is known where the rank was ended and did not fail itself."""
        failure = self._failure
        if failure is not None and failure.kind == ABORTED:
            message = f"{failure.message}: {why}"
            self._failure = replace(failure, kind=MPI_ENDED, message=message, log_tail=log_tail)

    def fail_result(self) -> None:
        """Take back a large result that could not be sent."""
        assert self.large is not None
        message = f"its result of {self.large.size:,} bytes could not be sent to the driver"
        self.large, self._failure = None, Failure(LAUNCH, time.time(), message)

    def close(self) -> None:
        self.process.close()
