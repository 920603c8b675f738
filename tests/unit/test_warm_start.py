"""Initial weights are refused on the driver if the training cannot use them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from horovod_spark_runner.checkpoint.files import CheckpointInfo, save_checkpoint
from horovod_spark_runner.checkpoint.resume import _check_same_engine
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.training import InitialWeights
from horovod_spark_runner.errors import ModelError, RunDirectoryError
from horovod_spark_runner.frameworks import KERAS, TORCH
from horovod_spark_runner.storage.arrays import dump_arrays
from horovod_spark_runner.training.engine import engine_named
from horovod_spark_runner.training.spec import Binding, WarmStart
from horovod_spark_runner.training.trained_model import WEIGHTS_FILE, ModelWriter, Signature
from horovod_spark_runner.training.warm_start import read_warm_start

KERNEL = np.arange(9, dtype=np.float32).reshape(3, 3)
OF = {KERAS: "Keras model", TORCH: "PyTorch module", "an.engine": "engine 'an.engine'"}


def warm_start_of(place: Path, engine: str) -> WarmStart:
    return read_warm_start(InitialWeights(place), engine, engine_named(engine).weights_formats)


def checkpoint(engine: str) -> CheckpointInfo:
    return CheckpointInfo(1, 1, [{}], "f", [("model/00000", "kernel", [3, 3], "float32")], engine)


def leave_model(place: Path, engine: str, *paths: str) -> Path:
    """Leave a run directory with a finished model."""
    writer = ModelWriter(RunDirectory(str(place)))
    writer.write(WEIGHTS_FILE, dump_arrays({"00000": KERNEL}))
    writer.finish(Signature(Binding(["features"]), (), None, engine, paths))
    return place


def leave_run(place: Path, engine: str) -> Path:
    """Leave a run directory with a checkpoint."""
    files = {"variables.npz": {"model/00000": KERNEL}}
    save_checkpoint(RunDirectory(str(place)), checkpoint(engine), files)
    return place


def leave_checkpoint(place: Path, engine: str) -> Path:
    """Leave a checkpoint's folder."""
    return leave_run(place, engine) / "checkpoints" / "step-00000001"


def leave_model_of_today(place: Path, engine: str) -> Path:
    return leave_model(place, engine, "kernel")


LEAVERS = (leave_model_of_today, leave_run, leave_checkpoint)


@pytest.mark.parametrize("leave", LEAVERS)
@pytest.mark.parametrize("engine", [KERAS, TORCH])
def test_a_run_of_the_same_engine(
    leave: Callable[[Path, str], Path], engine: str, tmp_path: Path
) -> None:
    assert warm_start_of(leave(tmp_path, engine), engine).paths == ("kernel",)


@pytest.mark.parametrize("leave", LEAVERS)
@pytest.mark.parametrize(("theirs", "ours"), [(TORCH, KERAS), (KERAS, TORCH), ("an.engine", KERAS)])
def test_a_run_of_another_engine_is_refused(
    leave: Callable[[Path, str], Path], theirs: str, ours: str, tmp_path: Path
) -> None:
    # A Dense layer would take the kernel of a Linear one, which fits it transposed.
    place = leave(tmp_path, theirs)
    pattern = f"{re.escape(str(place))}.*weights.*{OF[theirs]}.*{OF[ours]}"
    with pytest.raises(ModelError, match=pattern):
        warm_start_of(place, ours)


@pytest.mark.parametrize(
    ("name", "engine", "taken"),
    [
        ("a.pt", KERAS, ".keras.*.weights.h5.*SavedModel"),
        ("a.keras", TORCH, ".pt.*.pth.*state_dict"),
        ("saved", TORCH, ".pt.*.pth.*state_dict"),
        ("empty", KERAS, ".keras.*.weights.h5.*SavedModel"),
    ],
)
def test_a_format_of_another_engine_is_refused(
    name: str, engine: str, taken: str, tmp_path: Path
) -> None:
    (tmp_path / "a.pt").touch()
    (tmp_path / "a.keras").touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=f"run directory.*{taken}.*{OF[engine]}"):
        warm_start_of(tmp_path / name, engine)


@pytest.mark.parametrize(
    ("engine", "instead"),
    [
        (KERAS, ".keras.*.weights.h5.*SavedModel"),
        (TORCH, ".pt.*.pth.*state_dict.*.pt2.*torch.export"),
    ],
)
def test_a_model_without_paths_has_none_to_go_by(engine: str, instead: str, tmp_path: Path) -> None:
    weights = InitialWeights(leave_model(tmp_path, engine), skip_mismatch=True)
    with pytest.raises(ModelError, match=f"checkpoints.*{instead}"):
        read_warm_start(weights, engine, engine_named(engine).weights_formats)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="read"):
        warm_start_of(tmp_path / "none.keras", KERAS)


def test_a_run_is_resumed_by_its_own_engine() -> None:
    _check_same_engine(checkpoint(TORCH), TORCH, "here")
    for theirs, ours in ((TORCH, KERAS), (KERAS, TORCH)):
        pattern = f"here.*{OF[theirs]}.*{OF[ours]}"
        with pytest.raises(RunDirectoryError, match=pattern):
            _check_same_engine(checkpoint(theirs), ours, "here")
