"""What is recorded when, and what is left where a trace cannot be; a tracer made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_spark_runner import CheckpointOptions
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.training.traces import Timeline, Traces


class Recorder:
    """Notes what it was asked for, as a tracer; may fail to begin."""

    def __init__(self, *, fails: bool = False) -> None:
        self.asked: list[str] = []
        self._fails = fails

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if self._fails:
            raise RuntimeError("another profiler is running")

    def start_timeline(self, file: Path) -> None:
        self._note(f"begin {file.name}")
        file.write_text("[]\n")

    def stop_timeline(self) -> None:
        self.asked.append("end timeline")

    def start_profile(self) -> None:
        self._note("begin profile")

    def stop_profile(self, folder: Path, name: str) -> None:
        self.asked.append(f"end {name}")
        (folder / name).mkdir(parents=True)
        (folder / name / "trace").write_bytes(b"12")


def recorded(place: Path, recorder: Recorder, steps: int) -> list[str]:
    """Train so many steps, two an epoch, and validate after each; return what was said."""
    directory = RunDirectory(str(place))
    place.mkdir()
    said: list[str] = []
    options = CheckpointOptions(timeline=True, profile_steps=(1, 2))
    with directory.lease() as lease:
        spec: Any = SimpleNamespace(
            config=SimpleNamespace(checkpoints=options),
            engine="own",
            directory=RunDirectory(directory.location, lease.token),
        )
        traces = Traces(spec, 0, recorder, said.append)
        for step in range(steps):
            traces.before(step)
            recorder.asked.append(f"step {step + 1}")
            traces.after(step + 1)
            if step % 2:
                recorder.asked.append("validate")
        traces.close()
    return said


def test_a_profile_ends_with_its_last_step(tmp_path: Path) -> None:
    """The validation that follows is none of it."""
    recorder = Recorder()
    assert recorded(tmp_path / "run", recorder, 4) == []
    assert recorder.asked == [
        "begin timeline-00000000.json", "begin profile", "step 1", "step 2", "end step-00000001",
        "validate", "step 3", "step 4", "validate", "end timeline",
    ]  # fmt: skip
    events = tmp_path / "run" / "events"
    assert (events / "timeline-00000000.json").read_text() == "[]\n"
    assert (events / "profile" / "step-00000001" / "trace").read_bytes() == b"12"


def test_what_has_not_begun_is_not_ended(tmp_path: Path) -> None:
    """TensorFlow has one profiler, which a callback of the user's may have begun."""
    recorder = Recorder(fails=True)
    said = recorded(tmp_path / "run", recorder, 3)
    assert [one for one in recorder.asked if not one.startswith(("step ", "validate"))] == [
        "begin timeline-00000000.json",
        "begin profile",
    ]
    assert ["training" in line for line in said] == [True, True]
    assert "RuntimeError: another profiler is running" in said[1]


def test_a_folder_that_cannot_be_deleted_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the traces, such as the writer of checkpoints, is closed all the same."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Locked(Recorder):
        def start_timeline(self, file: Path) -> None:
            super().start_timeline(file)
            file.unlink()
            file.parent.rmdir()
            file.parent.write_text("no folder any more")

    recorded(tmp_path / "run", Locked(), 1)


@pytest.mark.parametrize("end", [",\n", "\n", "\n]\n"])
@pytest.mark.parametrize("events", [1, 2000])
def test_a_timeline_is_a_whole_list(tmp_path: Path, end: str, events: int) -> None:
    class Horovod:
        def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
            rows = ",\n".join(json.dumps({"name": f"ALLREDUCE.{n}"}) for n in range(events))
            Path(file_path).write_text(f"[\n{rows}{end}")

        def stop_timeline(self) -> None:
            pass

    timeline = Timeline(Horovod())
    timeline.start(tmp_path / "timeline.json")
    timeline.stop()
    assert len(json.loads((tmp_path / "timeline.json").read_text())) == events
