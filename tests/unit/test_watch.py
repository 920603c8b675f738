"""What the driver concludes from messages and silence, without any process."""

from __future__ import annotations

import re
from typing import Any

from horovod_spark_runner.cluster.driver.watch import (
    FAILED_GRACE,
    TASK_START_SECONDS,
    RunWatch,
    Verdict,
)
from horovod_spark_runner.cluster.protocol.messages import (
    Alive,
    Back,
    Disconnected,
    DriverEvent,
    Envelope,
    Failed,
    Hello,
    Log,
    RankReport,
    Silent,
    SlotReport,
    Started,
)
from horovod_spark_runner.cluster.protocol.outcome import (
    ABORTED,
    DIED,
    LOST,
    Failure,
    has_root_cause,
)
from horovod_spark_runner.config.launch import LaunchSettings


def watch(slots: int = 2, **options: Any) -> RunWatch:
    return RunWatch(slots, LaunchSettings(slots, **options), now=0.0)


def envelope(message: SlotReport | RankReport | DriverEvent, slot: int) -> Envelope:
    return Envelope(slot, slot, f"h{slot}", message)


def failed(kind: str, message: str, moment: float) -> Failed:
    return Failed.of(Failure(kind, moment, message))


def started(state: RunWatch, slots: int = 2) -> RunWatch:
    for slot in range(slots):
        state.take(envelope(Hello(), slot), 1.0)
        state.take(envelope(Started(), slot), 2.0)
    return state


def test_a_healthy_run_goes_on() -> None:
    assert started(watch()).decide(1e6) is Verdict.CONTINUE


def test_tasks_that_spark_never_starts() -> None:
    state = watch(4)
    state.take(envelope(Hello(), 0), 1.0)
    assert state.decide(TASK_START_SECONDS - 1) is Verdict.CONTINUE
    assert state.decide(TASK_START_SECONDS + 1) is Verdict.GIVE_UP
    error = state.not_started()
    assert (error.requested, error.available) == (4, 1)
    assert re.search(r"\b4 slots.*\b1\b", str(error))


def test_a_longer_wait_is_advised_where_it_helps() -> None:
    assert re.search(r"start_timeout.*\b60", str(watch(4).not_started()))
    assert re.search(r"start_timeout.*\b60", str(watch(4, start_timeout=5).not_started()))
    given = str(watch(4, start_timeout=600).not_started())
    assert "600 s" in given
    assert "start_timeout" not in given


def test_a_slot_that_connects_late_is_not_missing() -> None:
    state = watch(2)
    state.take(envelope(Hello(), 0), 1.0)
    state.take(envelope(Back(), 1), 5.0)  # its first connection had failed
    assert state.missing_slots == 0
    assert state.decide(TASK_START_SECONDS + 1) is Verdict.CONTINUE


def test_a_longer_start_is_waited_for_when_told_to() -> None:
    assert watch(start_timeout=600).decide(599) is Verdict.CONTINUE


def test_a_repeated_stage_ends_the_run_at_once() -> None:
    state = started(watch())
    state.take(envelope(Disconnected(5.0), 1), 5.0)
    state.take(envelope(Hello(), 1), 6.0)
    assert state.decide(6.0) is Verdict.GIVE_UP
    assert [(o.rank, o.failure.kind) for o in state.failures if o.failure] == [(1, LOST)]


def test_after_a_failure_the_others_get_a_moment() -> None:
    state = started(watch())
    state.take(envelope(failed(DIED, "exited", 5.0), 0), 5.0)
    assert state.decide(5.0 + FAILED_GRACE - 1) is Verdict.CONTINUE
    assert state.decide(5.0 + FAILED_GRACE + 1) is Verdict.GIVE_UP


def test_a_lost_connection_that_comes_back_is_no_failure() -> None:
    state = started(watch(heartbeat_timeout=30))
    state.take(envelope(Disconnected(5.0), 1), 5.0)
    state.take(envelope(Back(), 1), 11.0)
    assert state.decide(100.0) is Verdict.CONTINUE
    assert state.failures == []


def test_a_lost_connection_that_stays_lost_is_one() -> None:
    state = started(watch(heartbeat_timeout=30))
    state.take(envelope(Log(("last words",)), 1), 4.0)
    state.take(envelope(Disconnected(5.0), 1), 5.0)
    assert state.decide(34.0) is Verdict.CONTINUE
    assert state.decide(36.0) is Verdict.GIVE_UP
    (outcome,) = state.failures
    assert outcome.failure is not None
    assert outcome.failure.log_tail == ("last words",)


def test_silence_of_a_connected_slot() -> None:
    state = started(watch(heartbeat_timeout=15))
    state.take(envelope(Silent(15.0), 1), 20.0)
    assert state.decide(20.0 + FAILED_GRACE + 1) is Verdict.GIVE_UP
    assert "15 s" in str(state.failures[0].failure)


def test_a_stall_is_asked_about_once() -> None:
    state = started(watch(stall_timeout=10))
    state.take(envelope(Alive(), 0), 8.0)
    state.take(envelope(Log(("waiting for remainder of ranks",)), 0), 17.0)
    assert state.decide(17.0) is Verdict.CONTINUE
    assert state.decide(19.0) is Verdict.ASK_FOR_STACKS
    assert state.decide(20.0) is Verdict.CONTINUE
    assert state.decide(19.0 + FAILED_GRACE + 1) is Verdict.GIVE_UP


def test_a_driver_that_was_stopped_heard_of_no_progress() -> None:
    state = started(watch(stall_timeout=10))
    state.note_activity(60.0)
    assert state.decide(60.0) is Verdict.CONTINUE
    assert state.decide(69.0) is Verdict.CONTINUE
    assert state.decide(71.0) is Verdict.ASK_FOR_STACKS
    # However late it is, the stacks get their time.
    state = started(watch(stall_timeout=10))
    assert state.decide(100.0) is Verdict.ASK_FOR_STACKS
    assert state.decide(101.0) is Verdict.CONTINUE
    assert state.decide(100.0 + FAILED_GRACE + 1) is Verdict.GIVE_UP


def test_the_start_is_no_stall() -> None:
    state = watch(stall_timeout=1)
    state.take(envelope(Hello(), 0), 1.0)
    state.take(envelope(Hello(), 1), 1.0)
    assert state.decide(30.0) is Verdict.CONTINUE


def test_only_what_followed_from_a_failure_tells_nothing() -> None:
    state = started(watch())
    state.take(envelope(failed(ABORTED, "ended", 5.0), 0), 5.0)
    assert not has_root_cause(state.failures)
    state.take(envelope(failed(DIED, "exited", 6.0), 1), 6.0)
    assert has_root_cause(state.failures)
