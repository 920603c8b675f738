"""Learning rate schedules as long as the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import (
    InvalidInputError,
    TFTransformer,
    TorchCallback,
    TorchModel,
    training_steps,
)
from horovod_spark_runner.training.spec import TrainingSteps
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def test_a_keras_schedule_ends_with_the_training(small: Any, tmp_path: Path) -> None:
    import keras

    def model_fn() -> Any:
        layers = [keras.layers.Input((64,), name="image"), keras.layers.Dense(10, name="digit")]
        model = keras.Sequential(layers)
        schedule = keras.optimizers.schedules.CosineDecay(0.1, training_steps().total)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(schedule), loss)
        return model

    class Note(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["rate"] = float(self.model.optimizer.learning_rate)
            logs["per_epoch"] = training_steps().per_epoch

    frame, run_dir = small.filter("id < 100"), tmp_path / "run"
    # Without columns: a worker of Spark's builds the model, too, to learn its names.
    columns = {"feature_cols": None, "label_cols": None}
    model = train(frame, run_dir, model_fn=model_fn, callbacks=[Note()], epochs=2, **columns)
    history = model.summary.history
    assert [epoch["per_epoch"] for epoch in history] == [2, 2]
    assert [epoch["rate"] for epoch in history] == pytest.approx([0.05, 0.0], abs=1e-7)
    again = TFTransformer.from_run(str(run_dir), model_fn=model_fn)
    assert again.transform(frame).first() == model.transform(frame).first()
    with pytest.raises(InvalidInputError, match="training_steps.*model_fn"):
        training_steps()


@pytest.mark.thorough
def test_a_pytorch_scheduler_ends_with_the_training(small: Any, tmp_path: Path) -> None:
    made: list[Any] = []

    def scheduler(optimizer: Any) -> Any:
        from torch.optim.lr_scheduler import OneCycleLR

        made.append(OneCycleLR(optimizer, max_lr=0.1, total_steps=training_steps().total))
        return made[0]

    def model_fn() -> TorchModel:
        from torch import nn

        return TorchModel(nn.Linear(64, 10), "CrossEntropyLoss", "SGD", scheduler, schedule="step")

    class Check(TorchCallback):
        def on_train_end(self) -> None:
            assert training_steps() == TrainingSteps(per_epoch=2, total=6)
            # As after PyTorch's own loop: one beyond the last rate that was used.
            assert made[0].last_epoch == made[0].total_steps == 6

    frame = small.filter("id < 100")
    train(frame, tmp_path / "run", model_fn=model_fn, callbacks=[Check()], epochs=3)
