"""Decisions on restarts."""

from __future__ import annotations

import pickle

import pytest

from horovod_spark_runner.checkpoint.retry_policy import (
    FINISHED,
    KILLED,
    LOST,
    NO_SLOTS,
    PREEMPTED,
    RETRIED,
    USER_ERROR,
    Attempt,
    classify,
    decide,
    describe_attempts,
    steps_lost,
)
from horovod_spark_runner.config.training import RestartOptions, check_min_workers
from horovod_spark_runner.errors import (
    CheckpointError,
    EnvironmentProblem,
    HorovodSparkError,
    InvalidInputError,
    LaunchError,
    ModelError,
    NotEnoughSlotsError,
    PreemptedError,
    RankFailedError,
    RunCancelledError,
    StalledError,
    UnreachableError,
)
from horovod_spark_runner.storage.retries import HungError


def attempt(first: int, last: int, ending: str = KILLED, number: int = 1) -> Attempt:
    return Attempt(number, 2, 100.0, 107.0, first, last, ending, "because")


def rank_failed(kind: str | None) -> RankFailedError:
    return RankFailedError("x", rank=0, host="h", exception_type=kind)


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (rank_failed(None), True),
        (rank_failed("horovod.common.exceptions.HorovodInternalError"), True),
        (rank_failed("OSError"), True),
        (rank_failed("tensorflow.python.framework.errors_impl.UnavailableError"), True),
        (rank_failed("tensorflow.python.framework.errors_impl.InvalidArgumentError"), False),
        (rank_failed("FileNotFoundError"), False),
        (rank_failed(f"{HungError.__module__}.{HungError.__qualname__}"), True),
        (rank_failed("MemoryError"), True),
        (rank_failed("horovod_spark_runner.errors.LaunchError"), True),
        (pickle.loads(pickle.dumps(UnreachableError("a name node that is started again"))), True),
        (StalledError("no progress", stacks={}), True),
        (
            RankFailedError(
                "UnknownError: Horovod has been shut down.",
                rank=0,
                host="h",
                exception_type="tensorflow.python.framework.errors_impl.UnknownError",
            ),
            True,
        ),
        (rank_failed("ValueError"), False),
        (rank_failed("SystemExit"), False),
        (LaunchError("lost"), True),
        (StalledError("still", stacks={}), True),
        (CheckpointError("disk full"), True),
        (PreemptedError("SIGTERM"), True),
        (NotEnoughSlotsError("few", requested=2, available=1), True),
        (RunCancelledError("by the user"), False),
        (ModelError("shape"), False),
        (EnvironmentProblem("mpirun"), False),
    ],
)
def test_only_what_is_not_the_codes_own_fault_is_tried_again(
    error: HorovodSparkError, retried: bool
) -> None:
    assert (classify(error) in RETRIED) is retried


def test_restarts_are_counted() -> None:
    options = RestartOptions(max_restarts=2)
    attempts = [attempt(0, 5), attempt(4, 9)]
    assert decide(attempts, options, 1000.0).restart_at is not None
    over = decide([*attempts, attempt(8, 12)], options, 1000.0)
    assert over.restart_at is None
    assert "max_restarts=2" in over.reason


def test_none_is_the_default() -> None:
    assert decide([attempt(0, 5)], RestartOptions(), 0.0).restart_at is None


def test_users_errors_are_not_retried_whatever_is_allowed() -> None:
    decision = decide([attempt(0, 5, USER_ERROR)], RestartOptions(max_restarts=9), 0.0)
    assert decision.restart_at is None


def test_pauses_double_without_progress_and_start_over_with_it() -> None:
    options = RestartOptions(max_restarts=99, backoff_seconds=2.0)
    attempts = []
    pauses = []
    for first in (0, 0, 0, 10, 10, 20):
        attempts.append(attempt(first, first + 3))
        at = decide(attempts, options, 500.0).restart_at
        assert at is not None
        pauses.append(at - 500.0)
    assert pauses == [2.0, 4.0, 8.0, 2.0, 4.0, 2.0]
    at = decide([attempt(0, 3)] * 40, options, 0.0).restart_at
    assert at == 60.0


def test_slots_that_never_were_are_not_waited_for() -> None:
    options = RestartOptions(max_restarts=5)
    assert decide([attempt(0, 0, NO_SLOTS)], options, 0.0).restart_at is None
    assert decide([attempt(0, 5, LOST), attempt(4, 4, NO_SLOTS)], options, 0.0).restart_at


def test_steps_trained_again_are_counted() -> None:
    attempts = [attempt(0, 13), attempt(10, 21, PREEMPTED), attempt(21, 40, FINISHED)]
    assert steps_lost(attempts) == 3
    assert steps_lost(attempts[:1]) == 0


def test_attempts_are_told_in_a_line_each() -> None:
    assert describe_attempts([attempt(0, 13), attempt(10, 21, PREEMPTED, 2)]) == [
        "  attempt 1, 2 ranks, 7 s, steps 0 to 13: rank killed or lost: because",
        "  attempt 2, 2 ranks, 7 s, steps 10 to 21: preempted: because",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_restarts": -1}, "max_restarts.*-1"),
        ({"max_restarts": True}, "max_restarts.*True"),
        ({"min_workers": 0}, "min_workers.*0"),
        ({"backoff_seconds": -1.0}, "backoff_seconds.*-1.0"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        RestartOptions(**wrong)  # type: ignore[arg-type]


def test_a_restart_needs_no_more_ranks_than_the_run() -> None:
    with pytest.raises(InvalidInputError, match="min_workers=3.*num_workers=2"):
        check_min_workers(2, RestartOptions(min_workers=3))
