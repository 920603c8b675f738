"""Traces of a training, as other programs read them: Horovod's timeline, profiles of steps."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import CheckpointOptions, InvalidInputError, LaunchOptions
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.observe.report.times import _slow_ranks
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def timeline_in(run: Path) -> list[dict[str, Any]]:
    (file,) = (run / "events").glob("timeline-*.json")
    assert file.name == "timeline-00000000.json"
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


@pytest.mark.thorough
def test_a_keras_training_leaves_timeline_and_profile(small: Any, tmp_path: Path) -> None:
    """500 digits, two ranks of 32 rows: 8 steps an epoch."""
    options = CheckpointOptions(timeline=True, profile_steps=(3, 5))
    train(small, tmp_path / "run", epochs=1, checkpoints=options)
    events = timeline_in(tmp_path / "run")
    names = {event.get("name") for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "MPI_ALLREDUCE"} & names, names
    traced = {e["args"]["name"] for e in events if "name" in e.get("args", {})}
    assert any("gradient" in name for name in traced), traced
    (profile,) = (tmp_path / "run" / "events" / "profile" / "plugins" / "profile").iterdir()
    assert profile.name == "step-00000003"
    (file,) = profile.glob("*.xplane.pb")
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    counts: Counter[str] = Counter()
    for plane in space.planes:
        for line in plane.lines:
            counts.update(plane.event_metadata[event.metadata_id].name for event in line.events)
    backward = {name: n for name, n in counts.items() if name.startswith("gradient_tape/")}
    assert backward, sorted(counts)
    assert set(backward.values()) == {3}, "steps 3, 4 and 5"


@pytest.mark.thorough
def test_a_torch_training_leaves_timeline_and_profile(small: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.torch.models import digits_model

    options = CheckpointOptions(timeline=True, profile_steps=(3, 5))
    train(small, tmp_path / "run", epochs=1, checkpoints=options, model_fn=digits_model)
    names = {event.get("name") for event in timeline_in(tmp_path / "run")}
    assert {"NEGOTIATE_ALLREDUCE", "MPI_ALLREDUCE"} & names, names
    (file,) = (tmp_path / "run" / "events" / "profile").iterdir()
    assert file.name.endswith(".step-00000003.pt.trace.json")
    events = json.loads(file.read_text())["traceEvents"]
    steps = [e for e in events if str(e.get("name", "")).startswith("Optimizer.step#")]
    assert len(steps) == 3, "steps 3, 4 and 5"
    # What a step waits for is told from what it computes.
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = json.loads(line)["accounting"]["seconds"]
    assert all(0 < one < 5 for kind in ("compute", "exchange") for one in seconds[kind])
    assert "step" not in seconds


@pytest.mark.thorough
def test_waiting_for_a_callback_of_another_rank_is_waiting(small: Any, tmp_path: Path) -> None:
    """The first epoch's first step is left out: 15 steps, after which rank 1 takes 50 ms each."""

    def make() -> Any:
        import keras

        class Slow(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
                    time.sleep(0.05)

        return [Slow()]

    train(small, tmp_path / "run", epochs=2, callbacks=make)
    directory = RunDirectory(str(tmp_path / "run"))
    accounts = directory.read_accounts(2)
    seconds = [a["seconds"] for a in accounts if a is not None]
    for name, rank in (("callbacks", 1), ("exchange", 0)):
        spent, others = (sum(epoch[name][r] for epoch in seconds) for r in (rank, 1 - rank))
        assert spent > 2 * others, (name, rank, seconds)
    slow = _slow_ranks(accounts)
    assert slow.last == {1: 2}
    assert slow.waited > slow.exchanged / 2, "nearly all of the exchange is waiting for rank 1"


def test_traces_that_cannot_be_are_refused(small: Any, tmp_path: Path) -> None:
    for given in ((3,), (5, 3), (0, 2), "35", 7):
        with pytest.raises(InvalidInputError, match="profile_steps"):
            CheckpointOptions(profile_steps=given)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="16 steps.* 2 epochs.* 8"):
        train(small, tmp_path / "run", checkpoints=CheckpointOptions(profile_steps=(10, 17)))
    with pytest.raises(InvalidInputError, match="Horovod.*timeline"):
        train(
            small,
            tmp_path / "other",
            checkpoints=CheckpointOptions(timeline=True),
            launch=LaunchOptions(env={"HOROVOD_TIMELINE": "/tmp/timeline.json"}),
        )
