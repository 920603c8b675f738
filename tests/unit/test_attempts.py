"""The series of attempts, with a fake launcher."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.checkpoint.files import CheckpointInfo, save_checkpoint
from horovod_spark_runner.checkpoint.resume import StartingPoint, _find_checkpoint
from horovod_spark_runner.checkpoint.retry_policy import STOPPED, Attempt, steps_lost
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.cluster.driver.result import RunResult
from horovod_spark_runner.cluster.protocol.messages import Envelope, Progress, Resumed
from horovod_spark_runner.config.launch import LaunchSettings
from horovod_spark_runner.config.training import FitOptions, RestartOptions, TrainingConfig
from horovod_spark_runner.errors import (
    CheckpointError,
    NotEnoughSlotsError,
    PreemptedError,
    RankFailedError,
    RunDirectoryError,
    RunFailedError,
)
from horovod_spark_runner.observe.console import Console
from horovod_spark_runner.run.attempts import Attempts, Stopped
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.storage.lease import holds
from horovod_spark_runner.training.spec import (
    Binding,
    ModelSource,
    TrainingReport,
    TrainingSpec,
)


def spec_of(directory: RunDirectory) -> TrainingSpec:
    return TrainingSpec(
        config=TrainingConfig(model_fn=None),
        model=ModelSource(),
        inputs=Binding(("x",)),
        outputs=Binding(("y",)),
        train=None,  # type: ignore[arg-type]
        validation=None,
        run_dir=str(directory.location),
        run_id="r",
        workers=4,
        settings={},
    )


def start_of(directory: RunDirectory) -> StartingPoint:
    steps, checkpoint = _find_checkpoint(directory, "auto")
    return StartingPoint(checkpoint, steps, FitOptions(), None, None)


class Cluster:
    """Stands in for Spark: slots that come and go, and runs that end as told."""

    def __init__(self, directory: RunDirectory, slots: Sequence[int], ends: Sequence[Any]) -> None:
        self.directory = directory
        self.slots = list(slots)
        self.ends = list(ends)
        self.launched: list[tuple[int | None, int | None]] = []
        self.waited = 0
        self.done: list[Attempt] = []

    def warm_up(self, *args: Any) -> None:
        pytest.fail("a restart warms nothing up")

    def await_slots(self, spark: Any, options: LaunchSettings, workers: int) -> None:
        self.waited += 1
        slots = self.slots.pop(0)
        if slots < workers:
            raise NotEnoughSlotsError(f"found {slots}", requested=workers, available=slots)

    def launch(
        self,
        spark: Any,
        options: LaunchSettings,
        function: Any,
        args: Sequence[Any],
        kwargs: Any,
        observer: Any,
        modules: Any = None,
        workers: int | None = None,
    ) -> RunResult:
        (spec,) = args
        assert holds(self.directory.lock, spec.attempt.lease_token)
        self.launched.append((workers, spec.attempt.checkpoint))
        saved, reported, end = self.ends.pop(0)
        if saved:
            info = CheckpointInfo(saved, 0, [], "abc", [], "e", run_id="r")
            save_checkpoint(self.directory, info, {"variables.npz": {"a": np.zeros(1)}})
        progress = Progress(0, 1, 1, 2, reported, {})
        observer.on_message(Envelope(0, 0, "h", progress))
        if isinstance(end, BaseException):
            raise end
        return RunResult((TrainingReport([], 1.0, 1.0, end),), ())


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path))


def killed() -> RankFailedError:
    return RankFailedError("rank 1 was killed", rank=1, host="h")


def run(
    cluster: Cluster,
    start: StartingPoint | None = None,
    follower: Follower | None = None,
    **restarts: Any,
) -> tuple[Attempts, list[float], RunResult]:
    pauses: list[float] = []
    with cluster.directory.lease() as lease:
        attempts = Attempts(
            None,
            LaunchSettings(4, stream_logs=False),
            RestartOptions(**restarts),
            cluster.directory,
            lease,
            cluster,
            Console("run 1", quiet=True),
            pauses.append,
            start=start,
            followers=[] if follower is None else [follower],
        )
        try:
            result = attempts.run(spec_of(cluster.directory))
        finally:
            cluster.done = attempts.done
    return attempts, pauses, result


def test_it_goes_on_from_the_newest_checkpoint(directory: RunDirectory) -> None:
    cluster = Cluster(directory, [4, 4], [(10, 13, killed()), (20, 21, killed()), (30, 30, None)])
    attempts, pauses, _ = run(cluster, max_restarts=2, backoff_seconds=8.0)
    assert cluster.launched == [(4, None), (4, 10), (4, 20)]
    assert cluster.waited == 2
    assert [round(pause) for pause in pauses] == [8, 8]
    assert steps_lost(attempts.done) == 4
    lines = [json.loads(line) for line in directory.attempts.read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2, 3]
    assert [line["last_step"] for line in lines] == [13, 21, 30]


def test_an_attempt_deletes_what_killed_writers_left_half_written(
    monkeypatch: pytest.MonkeyPatch, directory: RunDirectory
) -> None:
    place, half = Path(str(directory.location)), "0a1b2c3d"
    (place / "model").mkdir()
    names = (f".metrics.jsonl.{half}", f".lock.json.{half}", f"model/.model.keras.{half}")
    swept = [place / name for name in names]
    remaining = [place / "model" / "model.keras", place / ".hidden"]
    for path in (*swept, *remaining):
        path.touch()
    run(Cluster(directory, [], [(0, 1, None)]))
    assert [path for path in (*swept, *remaining) if path.exists()] == remaining


def test_it_shrinks_and_grows_back(directory: RunDirectory) -> None:
    ends = [(10, 13, killed()), (20, 21, killed()), (30, 30, None)]
    cluster = Cluster(directory, [2, 4], ends)
    attempts, _, _ = run(cluster, max_restarts=2, min_workers=2)
    assert [workers for workers, _ in cluster.launched] == [4, 2, 4]
    assert [attempt.workers for attempt in attempts.done] == [4, 2, 4]


def test_it_waits_where_there_are_fewer_than_allowed(directory: RunDirectory) -> None:
    cluster = Cluster(directory, [1, 3], [(10, 13, killed()), (30, 30, None)])
    attempts, _, _ = run(cluster, max_restarts=2, min_workers=2)
    assert [a.ending for a in attempts.done] == ["rank killed or lost", "too few slots", "finished"]
    assert [workers for workers, _ in cluster.launched] == [4, 3]


def test_the_last_error_tells_all_attempts(directory: RunDirectory) -> None:
    user = replace_type(killed(), "ValueError")
    cluster = Cluster(directory, [4], [(10, 13, killed()), (0, 15, user)])
    with pytest.raises(RankFailedError) as caught:
        run(cluster, max_restarts=5)
    text = str(caught.value)
    assert re.search(r"attempt 1\b.*\b4 ranks.*\b0\b.*\b13\b.*rank killed or lost", text)
    assert re.search(r"attempt 2\b.*\b4 ranks.*\b10\b.*\b15\b.*user error", text)


def test_damaged_checkpoints_end_the_restarts(directory: RunDirectory) -> None:
    cluster = Cluster(directory, [4, 4], [(10, 13, killed())])
    launch = cluster.launch

    def damaging(*args: Any, **options: Any) -> RunResult:
        try:
            return launch(*args, **options)
        finally:
            directory.checkpoint(10).join("checkpoint.json").write_text("{")

    cluster.launch = damaging  # type: ignore[method-assign]
    with pytest.raises(RunDirectoryError, match="resume"):
        run(cluster, max_restarts=5)
    assert [attempt.ending for attempt in cluster.done] == ["rank killed or lost", "user error"]


@pytest.mark.parametrize("fault", ["storage", "damage"])
def test_a_record_that_cannot_be_read_is_not_written_over(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    earlier = '{"number": 1}\n' if fault == "storage" else '{"number": 1}\n{"numb'
    records = (directory.attempts, directory.calls)
    for file in records:
        file.write_text(earlier)
    with monkeypatch.context() as broken:
        if fault == "storage":
            read = Location.read_bytes

            def fail(place: Location, *limit: int) -> bytes:
                if place.name.endswith(".jsonl"):
                    raise OSError(5, "Input/output error")
                return read(place, *limit)

            broken.setattr(Location, "read_bytes", fail)
        run(Cluster(directory, [], [(0, 1, None)]))
        with pytest.raises((OSError, ValueError)):  # of which `CallRecord` warns
            directory.add_call({"ending": "finished"})
        assert directory.read_attempts() == directory.read_calls() == []
    assert [file.read_text() for file in records] == [earlier, earlier]


def replace_type(error: RankFailedError, kind: str) -> RankFailedError:
    return RankFailedError(str(error), rank=error.rank, host=error.host, exception_type=kind)


def test_preemption_is_an_error_without_restarts(directory: RunDirectory) -> None:
    cluster = Cluster(directory, [], [(17, 16, 17)])
    with pytest.raises(PreemptedError, match="step 17"):
        run(cluster)
    (done,) = cluster.done
    assert (done.ending, done.last_step) == ("preempted", 17)
    assert issubclass(PreemptedError, RunFailedError)


def test_attempts_are_numbered_over_calls(directory: RunDirectory) -> None:
    run(Cluster(directory, [], [(10, 10, None)]))
    attempts, _, _ = run(Cluster(directory, [], [(20, 20, None)]))
    assert [attempt.number for attempt in attempts.done] == [2]
    assert len(directory.read_attempts()) == 2
    assert attempts.done[0].first_step == 10


def test_an_attempt_that_went_on_from_earlier_than_thought_says_so(directory: RunDirectory) -> None:
    cluster = Cluster(directory, [], [(10, 10, None)])
    run(cluster)
    resumed = Cluster(directory, [], [(0, None, None)])

    def launch(*args: Any, **options: Any) -> RunResult:
        args[5].on_message(Envelope(0, 0, "h", Resumed(4)))  # that of step 10 was damaged
        return RunResult((TrainingReport([], 1.0, 1.0, None),), ())

    resumed.launch = launch  # type: ignore[method-assign]
    attempts, _, _ = run(resumed)
    assert [(done.first_step, done.last_step) for done in attempts.done] == [(4, 4)]


class Follower:
    """Follows a training until its first epoch is complete."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def epoch(self, progress: Progress) -> None:
        self.epochs.append(progress.epoch)

    def poll(self) -> None:
        if self.epochs:
            raise Stopped("it is pruned")


def test_a_follower_ends_a_run_for_good(directory: RunDirectory) -> None:
    follower, cluster = Follower(), Cluster(directory, [], [])

    def launch(*args: Any, **options: Any) -> RunResult:
        observer = args[5]
        observer.on_message(Envelope(0, 0, "h", Progress(0, 3, 1, 2, 1, {})))
        observer.poll()
        observer.on_message(Envelope(0, 0, "h", Progress(0, 3, 2, 2, 2, {"loss": 1.0})))
        observer.poll()
        pytest.fail("it was not ended")

    cluster.launch = launch  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        run(cluster, follower=follower, max_restarts=3)
    assert follower.epochs == [0]
    (attempt,) = cluster.done
    assert (attempt.ending, attempt.cause, attempt.last_step) == (STOPPED, "it is pruned", 2)


def test_an_interrupted_attempt_says_so_in_words(directory: RunDirectory) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Cluster(directory, [4], [(0, 3, KeyboardInterrupt())]))
    (attempt,) = directory.read_attempts()
    assert (attempt["ending"], attempt["cause"]) == (STOPPED, "interrupted (Ctrl-C)")


def test_what_the_driver_has_found_is_looked_at_again_only_if_others_have_come(
    directory: RunDirectory,
) -> None:
    run(Cluster(directory, [], [(10, 10, None)]))
    start = start_of(directory)
    assert start.checkpoint is not None
    assert (start.checkpoint.step, start.steps) == (10, (10,))
    manifest = directory.checkpoint(10).join("checkpoint.json")
    whole = manifest.read_bytes()
    manifest.delete_file()  # it is not read again
    cluster = Cluster(directory, [], [(0, 10, None)])
    run(cluster, start)
    assert cluster.launched == [(4, 10)]
    manifest.write_bytes(whole)
    # Another run has been here before this one held the lock.
    info = CheckpointInfo(20, 0, [], "abc", [], "e", run_id="r")
    save_checkpoint(directory, info, {"variables.npz": {"a": np.zeros(1)}})
    cluster = Cluster(directory, [4], [(0, 22, killed()), (0, 30, None)])
    run(cluster, start, max_restarts=1)
    assert cluster.launched == [(4, 20), (4, 20)]


def test_a_damaged_newest_is_told_once_and_the_one_before_found(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    run(Cluster(directory, [], [(10, 10, None)]))
    directory.checkpoint(20).make_folder()
    directory.checkpoint(20).join("checkpoint.json").write_text("{}")
    start = start_of(directory)
    assert start.checkpoint is not None
    assert (start.checkpoint.step, start.steps) == (10, (20, 10))
    cluster = Cluster(directory, [], [(0, 10, None)])
    run(cluster, start)
    assert cluster.launched == [(4, 10)]
    assert len([text for text in caplog.messages if "skipped" in text]) == 1


def test_columns_are_recorded_as_they_were_given() -> None:
    from horovod_spark_runner.run.columns import recorded_columns
    from horovod_spark_runner.training.spec import bind_columns

    for columns in (
        ["x", "y"],
        [["p", "q"]],
        {"a": "y", "b": "y"},
        {"a": "y", "b": None},
        {"a": ["p", "q"], "b": "r"},
    ):
        assert recorded_columns(bind_columns(columns, "label_cols")) == columns


class Away(RunDirectory):
    """A run directory whose storage goes away once it has been asked."""

    asked = False

    def checkpoint_steps(self) -> list[int]:
        if self.asked:
            raise CheckpointError("step-00000010 cannot be read: 503")
        self.asked = True
        return super().checkpoint_steps()


def test_storage_that_stays_away_uses_up_the_restarts(tmp_path: Path) -> None:
    directory = Away(str(tmp_path))
    cluster = Cluster(directory, [], [(0, 5, killed())])
    with pytest.raises(CheckpointError, match="503"):
        run(cluster, max_restarts=2)
    endings = [attempt["ending"] for attempt in directory.read_attempts()]
    assert endings == ["rank killed or lost", "storage failed", "storage failed"]
