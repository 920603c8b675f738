"""A run as a series of attempts; each of a training resumes from the newest checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..checkpoint.files import newest_checkpoint, read_steps
from ..checkpoint.resume import StartingPoint
from ..checkpoint.retry_policy import (
    FINISHED,
    RUNNING,
    STOPPED,
    Attempt,
    classify,
    decide,
    describe_attempts,
)
from ..checkpoint.run_directory import RunDirectory
from ..cluster.driver.launch import Launcher
from ..cluster.driver.result import RunResult
from ..cluster.protocol.command import ATTEMPT
from ..cluster.protocol.messages import Envelope, Progress, Resumed, Started
from ..config.launch import LaunchSettings
from ..config.training import RestartOptions
from ..errors import (
    HorovodSparkError,
    NotEnoughSlotsError,
    PreemptedError,
    RunFailedError,
)
from ..observe.console import Console
from ..storage.lease import Lease
from ..training.engine import engine_named, modules_for
from ..training.spec import AttemptSpec, TrainingSpec, train_rank, try_and_train_rank

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """A follower has ended the training."""


class Follower(Protocol):
    """Follows a training on the driver, and may end it. Called by the thread that trains."""

    def epoch(self, progress: Progress) -> None:
        """Handle a complete epoch; called again if the epoch is repeated."""

    def poll(self) -> None:
        """Raise to end the training, `Stopped` if that is no failure; polled all the time."""


@dataclass
class _StepObserver:
    """Shows a run on the console, and tracks its progress."""

    console: Console
    first_step: int = 0
    followers: Sequence[Follower] = ()

    def __post_init__(self) -> None:
        self.last_step = self.first_step

    def on_message(self, envelope: Envelope) -> None:
        match envelope.message:
            case Resumed(run_step):  # perhaps from an earlier checkpoint than the driver's
                self.first_step = self.last_step = run_step
            case Progress(run_step=run_step) as progress:
                # The end of an epoch is reported once it is saved, perhaps after steps of the next.
                self.last_step = max(run_step, self.last_step)
                if progress.step == progress.steps:
                    for follower in self.followers:
                        follower.epoch(progress)
            case Started() if envelope.rank == 0:
                self.console.report("building the model")
        self.console.on_message(envelope)

    def poll(self) -> None:
        self.console.poll()
        for follower in self.followers:
            follower.poll()

    def reached(self, attempt: Attempt) -> Attempt:
        """Return ``attempt`` with its actual first and last step."""
        return replace(attempt, first_step=self.first_step, last_step=self.last_step)

    def close(self) -> None:
        self.console.close()


def repeat(
    attempt: Callable[[], RunResult],
    done: Sequence[Attempt],
    restarts: RestartOptions,
    pause: Callable[[float], None] = time.sleep,
) -> RunResult:
    """Make attempts until one succeeds, or another would not help; return its result.

    Args:
        attempt: makes one, and adds it to ``done``.
        done: those of this call.
        restarts: options of restarts.
        pause: waits for so many seconds.

    Raises:
        HorovodSparkError: the last attempt's error, with a line for each attempt.
    """
    while True:
        try:
            return attempt()
        except HorovodSparkError as error:
            decision = decide(done, restarts, time.time())
            if decision.restart_at is None:
                if len(done) > 1 and isinstance(error, RunFailedError):
                    tried = "\n".join(describe_attempts(done))
                    error.args = (f"{error}\n\nAttempts:\n{tried}",)
                raise
            logger.warning("%s: %s", decision.reason, _first_line(error))
        pause(max(0.0, decision.restart_at - time.time()))


def available_workers(
    launcher: Launcher,
    spark: SparkSession | None,
    launch: LaunchSettings,
    wanted: int,
    restarts: RestartOptions,
) -> int:
    """Return for how many of the wanted ranks of a restart there are slots now.

    It waits for the executors that replace lost ones; then it may be fewer ranks, and the next
    restart requests all again.

    Raises:
        NotEnoughSlotsError: there are too few.
    """
    try:
        launcher.await_slots(spark, launch, wanted)
    except NotEnoughSlotsError as error:
        ranks = wanted * error.available // error.requested
        if ranks < (restarts.min_workers or wanted):
            raise
        logger.warning("continuing with %d ranks instead of %d", ranks, wanted)
        return ranks
    return wanted


def numbered(launch: LaunchSettings, number: int) -> LaunchSettings:
    """Return settings by which ranks know the number of their attempt; see `attempt`."""
    return replace(launch, env={**launch.env, ATTEMPT: str(number)})


@dataclass
class Attempts:
    """Runs one training until it is finished or must not be restarted.

    Attributes:
        spark: session to run in.
        launch: settings of starting the ranks.
        restarts: options of restarts.
        directory: the run directory.
        lease: its lease, held.
        launcher: starts the ranks.
        console: shows the run.
        pause: waits for so many seconds.
        done: the attempts of this call so far.
        start: starting point of the first attempt, unless there are other checkpoints by then.
        followers: follow the training, and may end it.
    """

    spark: SparkSession
    launch: LaunchSettings
    restarts: RestartOptions
    directory: RunDirectory
    lease: Lease
    launcher: Launcher
    console: Console
    pause: Callable[[float], None] = time.sleep
    done: list[Attempt] = field(default_factory=list)
    start: StartingPoint | None = None
    followers: Sequence[Follower] = ()

    def __post_init__(self) -> None:
        # Attempts of earlier calls; unreadable records are not overwritten.
        self._earlier: list[dict[str, Any]] | None
        try:
            self._earlier = self.directory.attempts_so_far()
        except (OSError, ValueError) as error:
            self._earlier = None
            logger.warning(
                "%s cannot be read (%s); it is unchanged, without this call's attempts",
                self.directory.attempts,
                error,
            )

    def run(self, spec: TrainingSpec) -> RunResult:
        """Train and return the ranks' results.

        Args:
            spec: the training; each attempt has its own `AttemptSpec`.

        Raises:
            HorovodSparkError: the last attempt's error, with a line for each attempt.
        """
        return repeat(lambda: self._attempt(spec), self.done, self.restarts, self.pause)

    def _attempt(self, spec: TrainingSpec) -> RunResult:
        newest = self._newest(spec)
        self.directory.sweep()
        first_step = newest or 0
        observer = _StepObserver(self.console, first_step, self.followers)
        attempt = self._begin(spec.workers, first_step)
        try:
            workers = spec.workers
            if self.done:
                workers = available_workers(
                    self.launcher, self.spark, self.launch, workers, self.restarts
                )
            attempt = replace(attempt, workers=workers)
            self._write(attempt)
            spec = replace(spec, attempt=AttemptSpec(newest, self.lease.begin_attempt()))
            tries_apart = engine_named(spec.engine).tries_apart
            result = self.launcher.launch(
                self.spark,
                numbered(self.launch, len(self.done) + 1),
                try_and_train_rank if tries_apart else train_rank,
                (spec,),
                {},
                observer,
                modules=modules_for(spec.engine),
                workers=workers,
            )
            saved = result.result.preempted_at
            if saved is not None:
                observer.last_step = saved
                raise PreemptedError(
                    f"the run was asked to end (SIGTERM) and saved a checkpoint of step {saved} in "
                    f"{self.directory.location}; the same call resumes from it, automatically with "
                    "max_restarts"
                )
        except BaseException as error:
            self._close(observer.reached(attempt), *ending_of(error))
            raise
        self._close(observer.reached(attempt), FINISHED)
        return result

    def _begin(self, workers: int, first_step: int) -> Attempt:
        return Attempt(
            number=len(self._earlier or ()) + len(self.done) + 1,
            workers=workers,
            started=time.time(),
            ended=time.time(),
            first_step=first_step,
            last_step=first_step,
            ending=RUNNING,
        )

    def _newest(self, spec: TrainingSpec) -> int | None:
        """Return the step of the checkpoint to resume from; ``None`` if there is none."""
        try:
            start = self.start
            if start is not None and not self.done and start.steps == read_steps(self.directory):
                return None if start.checkpoint is None else start.checkpoint.step
            newest = newest_checkpoint(self.directory, spec.run_id)
            return None if newest is None else newest[1].step
        except HorovodSparkError as error:
            # This counts as an attempt: persistent failures of storage use up the restarts, and
            # without a usable checkpoint there is no restart.
            first_step = self.done[-1].first_step if self.done else 0
            self._close(self._begin(spec.workers, first_step), classify(error), _first_line(error))
            raise

    def _close(self, attempt: Attempt, ending: str, cause: str = "") -> None:
        self.done.append(replace(attempt, ended=time.time(), ending=ending, cause=cause))
        self._write()

    def _write(self, *current: Attempt) -> None:
        if self._earlier is None:
            return
        lines = [asdict(attempt) for attempt in (*self.done, *current)]
        try:
            self.directory.write_attempts([*self._earlier, *lines])
        except OSError as error:  # the run does not depend on it
            logger.warning("%s could not be written: %s", self.directory.attempts, error)


def ending_of(error: BaseException) -> tuple[str, str]:
    """Return the ending of an attempt that raised ``error``, and its cause in one line."""
    if isinstance(error, HorovodSparkError):
        return classify(error), _first_line(error)
    if isinstance(error, Stopped):
        return STOPPED, str(error)
    if isinstance(error, KeyboardInterrupt):
        return STOPPED, "interrupted (Ctrl-C)"
    return type(error).__name__, repr(error)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
