"""PyTorch runs that are cut short and go on."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_spark_runner import (
    CheckpointOptions,
    InvalidInputError,
    ModelError,
    RankFailedError,
    RestartOptions,
    RunDirectoryError,
    TorchCallback,
    TorchEarlyStopping,
    TorchModel,
)
from horovod_spark_runner.checkpoint.files import read_info
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.testing import Fault, Faults, with_faults
from tests.runs import arrays_in, assert_same_weights, curves_in
from tests.torch.models import FaultAt, digits_model, digits_net, random_model
from tests.trainings import digits_model as keras_model
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

ROWS = 150  # of which steps of 16 leave 6


@pytest.fixture(scope="module")
def frame(digits_df: Any) -> Any:
    return digits_df.filter(f"id < {ROWS}").cache()


@pytest.fixture(scope="module")
def whole(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of three epochs of 10 steps that nothing has happened to."""
    return train(
        frame,
        tmp_path_factory.mktemp("whole") / "run",
        model_fn=random_model,
        batch_size=8,
        epochs=3,
        validation=frame.filter("id < 30"),
        callbacks=[NoTensorFlow()],
    )


class NoTensorFlow(TorchCallback):
    """Looks at what a rank has imported."""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        found = [name for name in ("tensorflow", "keras") if name in sys.modules]
        assert not found, found


@pytest.mark.parametrize(
    ("step", "kind"),
    [pytest.param(10, "kill", marks=pytest.mark.thorough), (18, "terminate")],
)
def test_a_run_that_is_cut_short_ends_as_if_it_had_not_been(
    frame: Any, whole: Any, tmp_path: Path, step: int, kind: Any
) -> None:
    place = tmp_path / "run"
    faults = Faults((Fault(step, rank=1, kind=kind),), str(tmp_path / "notes"))
    kept = place / "checkpoints" / f"step-{step - step % 4:08d}"
    run = train(
        frame,
        place,
        model_fn=random_model,
        batch_size=8,
        epochs=3,
        validation=frame.filter("id < 30"),
        callbacks=[FaultAt(faults, kept), NoTensorFlow()],
        checkpoints=CheckpointOptions(every_steps=4),
        restarts=RestartOptions(max_restarts=1, backoff_seconds=0.1),
    )
    assert len(run.summary.attempts) == 2
    assert run.summary.history == whole.summary.history
    assert_same_weights(place, Path(whole.summary.run_dir))
    rates = curves_in(Path(whole.summary.run_dir) / "events" / "train")["learning_rate"]
    assert [rate for _, rate in rates] == pytest.approx([0.0025, 0.0025, 0.0025])
    assert curves_in(place / "events" / "train")["learning_rate"] == rates


@pytest.mark.thorough
def test_what_a_call_that_goes_on_may_change(
    frame: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "run"
    given: dict[str, Any] = {"batch_size": 12, "epochs": 1}
    train(frame, place, model_fn=digits_model, **given)

    def faster() -> TorchModel:
        return TorchModel(digits_net(), "CrossEntropyLoss", sgd(0.7))

    # On three ranks, with another rate, which the checkpoint's takes the place of.
    run = train(frame, place, model_fn=faster, num_workers=3, batch_size=8, epochs=2)
    assert re.search("lr.*SGD.*0.7.*0.1.*checkpoint", caplog.text)
    newest = read_info(Location(max((place / "checkpoints").iterdir())))
    (group,) = newest.model["optimizers"][""]["groups"]
    assert group["lr"] == 0.1  # as the next call that goes on is told
    other = train(frame, tmp_path / "other", model_fn=digits_model, batch_size=12, epochs=2)
    assert_same_weights(place, tmp_path / "other", atol=1e-5)
    ours, theirs = (each.summary.history[1]["loss"] for each in (run, other))
    assert ours == pytest.approx(theirs, rel=1e-4)

    def adam() -> TorchModel:
        return TorchModel(digits_net(), "CrossEntropyLoss", torch.optim.Adam)

    with pytest.raises(RunDirectoryError, match="optimizer.*'Adam'.*'SGD'"):
        train(frame, place, model_fn=adam, **{**given, "epochs": 3})


def sgd(rate: float) -> Any:
    import functools

    return functools.partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=1e-3)


@pytest.mark.thorough
def test_warm_starts_and_an_early_end(frame: Any, tmp_path: Path) -> None:
    started = digits_net()
    with torch.no_grad():
        for parameter in started.parameters():
            parameter.mul_(0.5)
    torch.save(started.state_dict(), tmp_path / "start.pt")

    def still() -> TorchModel:
        return TorchModel(digits_net(), "CrossEntropyLoss", sgd(1e-30))

    run = train(
        frame,
        tmp_path / "run",
        model_fn=still,
        epochs=6,
        validation=0.2,
        initial_weights=str(tmp_path / "start.pt"),
        callbacks=[TorchEarlyStopping(patience=2)],
    )
    assert len(run.summary.history) == 3  # the first is the best, and two are no better
    weights = arrays_in(tmp_path / "run" / "model" / "weights.npz")
    for number, expected in enumerate(started.state_dict().values()):
        np.testing.assert_allclose(weights[f"{number:05d}"], expected.numpy(), rtol=1e-6)
    again = train(
        frame,
        tmp_path / "again",
        model_fn=still,
        epochs=1,
        initial_weights=str(tmp_path / "run"),
    )
    assert again.summary.history[0]["loss"] == pytest.approx(
        run.summary.history[0]["loss"], rel=0.2
    )
    assert_same_weights(tmp_path / "again", tmp_path / "run", atol=1e-6)

    def wider() -> TorchModel:
        return TorchModel(nn.Linear(64, 10), "CrossEntropyLoss", "SGD")

    with pytest.raises(ModelError, match=r"'0\.weight'|'weight'"):
        train(frame, tmp_path / "no", model_fn=wider, initial_weights=str(tmp_path / "run"))


def test_a_run_of_a_module_is_none_of_a_keras_model(frame: Any, whole: Any, tmp_path: Path) -> None:
    run = whole.summary.run_dir
    with pytest.raises(RunDirectoryError, match="run.*PyTorch.*Keras"):
        train(frame, run, model_fn=keras_model)
    with pytest.raises(ModelError, match="weights.*PyTorch.*Keras"):
        train(frame, tmp_path / "new", model_fn=keras_model, initial_weights=run)


def test_a_saved_model_is_none_of_a_module(frame: Any, tmp_path: Path) -> None:
    wanted = CheckpointOptions(saved_model=True)
    with pytest.raises(InvalidInputError, match="saved_model=True.*Keras"):
        train(frame, tmp_path / "new", model_fn=random_model, checkpoints=wanted)


@pytest.mark.thorough
def test_faults_of_users_tests(frame: Any, tmp_path: Path) -> None:
    """One happens in the second epoch, once: the same call goes on behind it."""
    faults = [Fault(12, kind="raise")]
    given: dict[str, Any] = {
        "model_fn": digits_model,
        "num_workers": 1,
        "batch_size": 16,
        "callbacks": with_faults(faults, tmp_path / "notes", [NoStop()], framework="torch"),
    }
    with pytest.raises(RankFailedError, match=r"Fault\(step=12, rank=0, kind='raise'"):
        train(frame, tmp_path / "run", **given)
    history = train(frame, tmp_path / "run", **given).summary.history
    assert len(history) == 2
    with pytest.raises(InvalidInputError, match=r"callbacks.*\b3\b.*TorchCallback"):
        with_faults(faults, tmp_path / "notes", [3], framework="torch")


class NoStop(TorchCallback):
    pass
