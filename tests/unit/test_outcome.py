"""Which failure explains a run, and how it is told."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import cloudpickle
import pytest

from horovod_spark_runner.cluster.driver.result import explain_spark_error, unpickle_exception
from horovod_spark_runner.cluster.protocol import outcome as outcome_module
from horovod_spark_runner.cluster.protocol.outcome import (
    ABORTED,
    DIED,
    ENVIRONMENT,
    LAUNCH,
    MPI_ENDED,
    RAISED,
    STALLED,
    Failure,
    RankOutcome,
    decode_outcomes,
    encode_outcome,
    failure_error,
    has_root_cause,
    root_cause,
)
from horovod_spark_runner.cluster.protocol.topology import RankPlacement
from horovod_spark_runner.errors import (
    CheckpointError,
    DataError,
    EnvironmentProblem,
    LaunchError,
    RankFailedError,
    RanksDivergedError,
)


def outcome(rank: int, failure: Failure | None = None) -> RankOutcome:
    return RankOutcome(
        rank, f"h{rank}", RankPlacement(rank, rank, f"h{rank}", 0, rank), failure=failure
    )


def failed(kind: str, time: float, **more: object) -> Failure:
    return Failure(kind, time, f"{kind} at {time}", **more)  # type: ignore[arg-type]


def test_no_failure_no_cause() -> None:
    assert root_cause([outcome(0), outcome(1)]) is None


def test_the_first_by_time_is_the_cause() -> None:
    late, early = outcome(0, failed(RAISED, 5.0)), outcome(1, failed(RAISED, 4.0))
    assert root_cause([late, early]) is early


def test_an_aborted_rank_is_never_the_cause_of_another() -> None:
    aborted, raised = outcome(0, failed(ABORTED, 1.0)), outcome(1, failed(RAISED, 5.0))
    assert root_cause([aborted, raised]) is raised


def test_that_mpirun_ended_explains_more_than_that_a_rank_was_ended() -> None:
    aborted = outcome(1, Failure(ABORTED, 1.0, "MPI ended it"))
    ended = outcome(0, Failure(MPI_ENDED, 2.0, "MPI ended it: mpirun exited with code 1"))
    died = outcome(2, Failure(DIED, 3.0, "killed"))
    assert root_cause([aborted, ended], [(1, 1), (0, 0)]) is ended
    assert root_cause([aborted, ended, died], [(1, 1), (0, 0)]) is died
    assert not has_root_cause([aborted, ended])
    assert "mpirun exited" in str(failure_error(ended, [aborted, ended], None))


def test_horovods_complaint_about_a_lost_peer_is_secondary() -> None:
    complaint = failed(RAISED, 1.0, exception_type="horovod.common.exceptions.HorovodInternalError")
    lost = outcome(1, failed(DIED, 2.0))
    assert root_cause([outcome(0, complaint), lost]) is lost


def test_the_message_names_rank_host_traceback_and_the_others() -> None:
    cause = outcome(
        1, failed(RAISED, 1.0, exception_type="KeyError", traceback="Traceback…\nKeyError")
    )
    original = KeyError("x")
    error = failure_error(cause, [outcome(0, failed(ABORTED, 2.0)), cause, outcome(2)], original)
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.host, error.exception_type) == (1, "h1", "KeyError")
    assert error.__cause__ is original
    text = str(error)
    assert re.match(r"rank 1\b.*\bh1\b.*raised at 1.0", text)
    assert "Traceback…" in text
    assert re.search(r"rank 0\b.*\bh0\b.*aborted at 2.0", text)
    assert re.search(r"rank 2\b.*\bh2\b.*finished", text)


@pytest.mark.parametrize(
    ("exception_type", "named"),
    [
        ("torch.OutOfMemoryError", True),
        ("torch.cuda.OutOfMemoryError", True),
        ("tensorflow.python.framework.errors_impl.ResourceExhaustedError", True),
        ("RuntimeError", False),
        (None, False),
    ],
)
def test_a_gpu_without_memory_left_names_the_batch_size(
    exception_type: str | None, named: bool
) -> None:
    cause = outcome(0, failed(RAISED, 1.0, exception_type=exception_type))
    assert ("batch_size" in str(failure_error(cause, [cause], None))) == named


def test_a_killed_ranks_last_lines_are_shown() -> None:
    cause = outcome(0, failed(DIED, 1.0, log_tail=("line one", "line two")))
    assert "  line one\n  line two" in str(failure_error(cause, [cause], None))


def test_wrong_input_found_on_a_worker_is_told_as_such() -> None:
    cause = outcome(0, failed(RAISED, 1.0))
    problem = DataError("column x")
    assert failure_error(cause, [cause], problem) is problem


def test_what_all_ranks_found_together_is_told_as_such() -> None:
    cause = outcome(1, failed(RAISED, 1.0))
    problem = RanksDivergedError("1 variable differs")
    assert failure_error(cause, [cause, outcome(0, failed(RAISED, 1.1))], problem) is problem


def test_a_slot_that_could_not_start_is_a_launch_error() -> None:
    cause = outcome(0, failed(LAUNCH, 1.0))
    assert isinstance(failure_error(cause, [cause], None), LaunchError)


def test_what_is_not_installed_is_told_as_such_with_its_place() -> None:
    cause = outcome(1, failed(RAISED, 1.0))
    missing = EnvironmentProblem("Pillow is not installed")
    told = failure_error(cause, [cause], missing)
    assert type(told) is EnvironmentProblem
    assert re.fullmatch(r"rank 1\b.*\bh1\b.*Pillow is not installed", str(told))
    assert told.__cause__ is missing
    slot = RankOutcome(2, "h2", failure=Failure(ENVIRONMENT, 1.0, "mpirun was not found"))
    told = failure_error(slot, [slot], None)
    assert type(told) is EnvironmentProblem
    assert re.fullmatch(r"slot 2\b.*\bh2\b.*mpirun was not found", str(told))


def test_clocks_of_different_hosts_do_not_tell_what_came_first() -> None:
    ahead, behind = outcome(0, failed(RAISED, 103.0)), outcome(1, failed(RAISED, 100.5))
    assert root_cause([ahead, behind], [(0, 0), (1, 1)]) is ahead
    assert root_cause([ahead, behind], [(1, 1), (0, 0)]) is behind


def test_an_exception_explains_more_than_what_followed_from_it() -> None:
    raised = outcome(0, failed(RAISED, 103.0, exception_type="ValueError"))
    died = outcome(1, failed(DIED, 100.0))
    shut_down = outcome(
        2, Failure(RAISED, 99.0, "UnknownError: Horovod has been shut down.", "UnknownError")
    )
    assert root_cause([died, raised, shut_down], [(1, 1), (2, 2), (0, 0)]) is raised
    assert root_cause([died, shut_down], [(2, 2), (1, 1)]) is died
    lost = failed(RAISED, 101.0, exception_type="tensorflow.python.framework.errors_impl.X")
    assert root_cause([died, outcome(0, lost)], [(1, 1), (0, 0)]) is died


def test_no_framework_is_loaded_for_an_exception() -> None:
    class Loading(Exception):
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was unpickled",)

    failure = Failure(
        RAISED, 0.0, "x", "torch.cuda.OutOfMemoryError", exception=cloudpickle.dumps(Loading())
    )
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "torch"}
    assert unpickle_exception(failure) is None
    assert "torch" not in sys.modules
    sys.modules.update(loaded)
    known = Failure(RAISED, 0.0, "x", "ValueError", exception=cloudpickle.dumps(ValueError("y")))
    assert str(unpickle_exception(known)) == "y"


def test_an_exception_of_ours_that_was_only_told_is_made_again() -> None:
    kind = "horovod_spark_runner.errors.CheckpointError"
    told = Failure(RAISED, 1.0, "CheckpointError: step 6 could not be written", kind)
    made = unpickle_exception(told)
    assert isinstance(made, CheckpointError)
    assert str(made) == "step 6 could not be written"
    richer = Failure(RAISED, 1.0, "NotEnoughSlotsError: x", f"{kind[:27]}.NotEnoughSlotsError")
    assert unpickle_exception(richer) is None


def test_a_rank_that_mpi_did_not_know_any_more_is_no_cause() -> None:
    kind = "horovod_spark_runner.errors.LaunchError"
    alone = outcome(0, Failure(RAISED, 1.0, "LaunchError: MPI made it rank 0 of 1", kind))
    killed = outcome(1, Failure(DIED, 2.0, "killed by SIGKILL"))
    assert root_cause([alone, killed], [(0, 0), (1, 1)]) is killed


def test_what_spark_says_begins_with_the_cause() -> None:
    error = RuntimeError(
        "An error occurred while calling o215.collectToPython.\n: org.apache.spark.SparkException: "
        "Job aborted: ExecutorLostFailure (executor 0 exited)\n\tat a.b(c.scala:1)"
    )
    told = str(explain_spark_error(error))
    assert "org.apache.spark.SparkException: Job aborted" in told.splitlines()[0]
    assert "at a.b" not in told
    # As Kubernetes has it.
    lost = "ExecutorLostFailure (executor 0 exited) Reason: \nexit code 137\n\n\t reason: OOMKilled"
    barrier_stage = "Stage failed because barrier task ResultTask(5, 1) finished unsuccessfully."
    gone = ConnectionRefusedError(111, "Connection refused")
    assert re.search("driver's JVM has ended.*refused", str(explain_spark_error(gone)))
    stack = "Driver stacktrace:\n\tat a.b(c.scala:1)"
    told = str(explain_spark_error(RuntimeError(f"Job aborted: {barrier_stage}\n{lost}\n{stack}")))
    first, second = told.splitlines()[:2]
    assert first.endswith("(executor 0 exited) Reason: exit code 137 reason: OOMKilled")
    assert second == f"Job aborted: {barrier_stage}"


def test_outcomes_of_any_size_come_through_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome_module, "PIECE_BYTES", 1000)
    sent = [
        RankOutcome(slot, "host", result=bytes(range(256)) * size)
        for slot, size in ((1, 0), (0, 9), (0, 1))
    ]
    indices = [0, 0, 1]
    pieces = [
        piece
        for outcome, index in zip(sent, indices, strict=True)
        for piece in encode_outcome(outcome, index)
    ]
    assert len(pieces) > len(sent)
    assert decode_outcomes(reversed(pieces)) == [sent[1], sent[2], sent[0]]


def test_a_slot_needs_no_pandas_to_answer() -> None:
    """Importing it takes longer than a run of a function that is warm."""
    code = """
import sys
from horovod_spark_runner.cluster.protocol.outcome import RankOutcome
from horovod_spark_runner.cluster.protocol.outcome import decode_outcomes, encode_outcome
from horovod_spark_runner.cluster.spark.tasks import _OfBatches
import horovod_spark_runner.cluster.slot.slot
outcome = RankOutcome(0, "host", result=b"x")
batches = list(_OfBatches(lambda: encode_outcome(outcome, 0))([]))
[batch.validate(full=True) for batch in batches]
assert decode_outcomes([value.as_py() for value in batches[0].column("data")]) == [outcome]
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_stall_says_what_any_slot_knows_of_it() -> None:
    first = Failure(STALLED, 1.0, "no rank reported progress")
    second = Failure(STALLED, 2.0, "no rank reported progress; mpirun (process 7) is stopped")
    ended = Failure(
        ABORTED, 3.0, "ended because another rank failed, in whatever many words that takes"
    )
    outcomes = [outcome(0, second), outcome(1, first), outcome(2, ended)]
    error = failure_error(outcomes[1], outcomes, None)
    assert str(error).startswith("no rank reported progress; mpirun (process 7) is stopped\n")
