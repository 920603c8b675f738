"""Modules of Lightning: N ranks train what Lightning's own Trainer does in one process."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_spark_runner import (
    CheckpointOptions,
    DataOptions,
    InvalidInputError,
    ModelError,
    RestartOptions,
    TorchModel,
    TorchTransformer,
)
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch
from horovod_spark_runner.engines.torch.engine import ENGINE
from horovod_spark_runner.engines.torch.lightning.adapter import (
    TrainerFacts,
    check_module,
    configure_optimizers,
)
from horovod_spark_runner.frameworks import TORCH
from horovod_spark_runner.testing import Fault, Faults
from horovod_spark_runner.training.engine import engine_of
from tests.runs import arrays_in, spec_of
from tests.torch.models import FaultAt, flat_weights
from tests.trainings import train

lightning: Any = pytest.importorskip("lightning")
from tests.torch.lightning_models import Digits, Particular  # noqa: E402

GLOBAL_BATCH = 24
ROWS = 4 * GLOBAL_BATCH + 19
EPOCHS = 2
DOCS = Path(__file__).parents[2] / "docs" / "torch.md"


class Batches(torch.utils.data.IterableDataset[Any]):
    """The global batches of a run, epoch by epoch."""

    def __init__(self, run: Path, *, labels: bool) -> None:
        found = [
            Manifest.from_json(path.read_text()) for path in run.glob("data/data-*/manifest.json")
        ]
        self.manifest = max(found, key=lambda each: each.rows)
        self.labels, self.epoch = labels, 0

    def __len__(self) -> int:
        return -(-self.manifest.rows // GLOBAL_BATCH)

    def __iter__(self) -> Iterator[Any]:
        plan = plan_epoch(
            [(group.rows, group.size) for group in self.manifest.row_groups],
            global_batch=GLOBAL_BATCH,
            seed=0,
            epoch=self.epoch,
            window_bytes=256 * 1024 * 1024,
        )
        self.epoch += 1
        for batch in DatasetReader(self.manifest).epoch(plan, 0, 1):
            image = torch.from_numpy(batch.arrays["image"].copy())
            if self.labels:
                yield image, torch.from_numpy(batch.arrays["digit"].copy()).long()
            else:
                yield image


class Noting(lightning.Callback):
    """Notes what Lightning reports at the end of each epoch."""

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.trainer = trainer

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer)

    def note(self, trainer: Any) -> None:
        if trainer.callback_metrics:
            self.history.append({n: float(v) for n, v in trainer.callback_metrics.items()})


def by_lightning(
    module: Any, batches: Batches, held: Any = None, **more: Any
) -> list[dict[str, float]]:
    """Train by Lightning's own Trainer, in this process; return what it reports."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    noting = Noting()
    trainer = lightning.Trainer(
        plugins=[LightningEnvironment()],  # it would begin MPI to see whether it is wanted
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[noting],
        **more,
    )
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(module, loader, held)
    return noting.history


@pytest.fixture(scope="module")
def frame(digits_df: Any) -> Any:
    return digits_df.filter(f"id < {ROWS}").cache()


@pytest.fixture(scope="module")
def held(digits_df: Any) -> Any:
    return digits_df.filter(f"id >= {ROWS} and id < {ROWS + 41}").cache()


def loader_of(held: Any) -> Any:
    rows = held.collect()
    images = torch.tensor([row["image"] for row in rows])
    digits = torch.tensor([row["digit"] for row in rows])
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, digits), batch_size=GLOBAL_BATCH
    )


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_ranks_train_what_lightnings_trainer_does(frame: Any, held: Any, tmp_path: Path) -> None:
    """A run of three ranks, killed within an epoch: weights, and all that is logged."""
    faults = Faults((Fault(7, rank=1, kind="kill"),), str(tmp_path / "notes"))
    run = train(
        frame,
        tmp_path / "run",
        model_fn=Digits,
        num_workers=3,
        batch_size=GLOBAL_BATCH // 3,
        epochs=EPOCHS,
        validation=held,
        data=DataOptions(keep_data=True),
        checkpoints=CheckpointOptions(
            every_steps=2, best_metric="val_MulticlassAUROC", best_mode="max"
        ),
        restarts=RestartOptions(max_restarts=1, backoff_seconds=0.1),
        callbacks=[FaultAt(faults, tmp_path / "run" / "checkpoints" / "step-00000006")],
    )
    assert len(run.summary.attempts) == 2
    module = Digits()
    expected = by_lightning(module, Batches(tmp_path / "run", labels=True), loader_of(held))
    np.testing.assert_allclose(flat_weights(run.getModel()), flat_weights(module), atol=2e-5)
    for ours, theirs in zip(run.summary.history, expected, strict=True):
        assert ours.pop("loss") == pytest.approx(theirs.pop("train_loss_epoch"), rel=1e-5)
        theirs.pop("train_loss_step")
        assert ours == pytest.approx(theirs, rel=1e-4)
    # What is kept is read without the module's code; Spark's tasks know none of its logs.
    again = TorchTransformer.from_run(str(tmp_path / "run"), trusted=True)
    assert again.evaluate(held, metrics=["accuracy"])["accuracy"] == pytest.approx(
        run.summary.history[-1]["val_MulticlassAccuracy"]
    )
    with pytest.raises(ModelError, match="Digits.validation_step"):
        run.evaluate(held)


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_what_a_module_does_besides(frame: Any, held: Any, tmp_path: Path) -> None:
    """Parts that stay in evaluation mode and that are trained later, buffers that it sets."""
    given: dict[str, Any] = {
        "model_fn": Particular,
        "batch_size": GLOBAL_BATCH // 2,
        "validation": held,
        "validation_freq": 2,
        "data": DataOptions(keep_data=True),
        "checkpoints": CheckpointOptions(best_metric="val_loss"),
    }
    # Gone on with in the epoch in which its first layer begins to be trained.
    faults = Faults((Fault(8, rank=1, kind="kill"),), str(tmp_path / "notes"))
    kept = tmp_path / "run" / "checkpoints" / "step-00000006"
    run = train(
        frame,
        tmp_path / "run",
        **{
            **given,
            "epochs": EPOCHS,
            "checkpoints": CheckpointOptions(best_metric="val_loss", every_steps=2),
            "restarts": RestartOptions(max_restarts=1, backoff_seconds=0.1),
            "callbacks": [FaultAt(faults, kept)],
        },
    )
    module = Particular()
    batches = Batches(tmp_path / "run", labels=True)
    expected = by_lightning(module, batches, loader_of(held), check_val_every_n_epoch=2)
    weights = dict(module.state_dict())
    found = arrays_in(tmp_path / "run" / "model" / "weights.npz")
    for number, (name, value) in enumerate(weights.items()):
        np.testing.assert_allclose(found[f"{number:05d}"], value, atol=2e-5, err_msg=name)
    started = Particular().state_dict()["backbone.0.weight"]
    assert not torch.equal(weights["backbone.0.weight"], started), "it was not trained"
    for ours, theirs in zip(run.summary.history, expected, strict=True):
        ours.pop("loss")
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert expected[1]["val_mode"] == 0.0


SGD = torch.optim.SGD
StepLR = torch.optim.lr_scheduler.StepLR
Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


def made(forms: Any) -> Any:
    """Return a module whose optimizers are given in some form."""

    class Made(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def training_step(self, batch: Any) -> Any:
            return self.net(batch).mean()

        def configure_optimizers(self) -> Any:
            return forms(SGD(self.parameters(), lr=0.1))

    return Made()


@pytest.mark.parametrize(
    ("form", "plans"),
    [
        (lambda o: o, []),
        (lambda o: [o], []),
        (lambda o: ([o], [StepLR(o, 1)]), [("epoch", None)]),
        (lambda o: {"optimizer": o}, []),
        (lambda o: [{"optimizer": o, "lr_scheduler": StepLR(o, 1)}], [("epoch", None)]),
        (
            lambda o: ([o], [{"scheduler": StepLR(o, 1), "interval": "step", "frequency": 1}]),
            [("step", None)],
        ),
        (
            lambda o: {"optimizer": o, "lr_scheduler": Plateau(o), "monitor": "val_loss"},
            [("epoch", "val_loss")],
        ),
        (
            lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": Plateau(o), "monitor": "x"}},
            [("epoch", "x")],
        ),
    ],
)
def test_forms_of_configure_optimizers(form: Any, plans: list[Any]) -> None:
    optimizer, planned = configure_optimizers(made(form))
    assert isinstance(optimizer, SGD)
    assert [(plan.every, plan.monitor) for plan in planned.values()] == plans


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda o: None, "optimizer.*dictionary.*None"),
        (lambda o: [o, o], r"one optimizer.*\[.*SGD.*several.*train_step"),
        (lambda o: {"optimiser": o}, "'optimiser'"),
        (lambda o: ([o], [{"scheduler": StepLR(o, 1), "interval": "batch"}]), "'batch'"),
        (lambda o: ([o], [{"scheduler": StepLR(o, 1), "frequency": 2}]), r"'frequency' \(2\)"),
        (lambda o: ([o], [{"scheduler": StepLR(o, 1), "strict": False}]), r"'strict' \(False\)"),
        (
            lambda o: ([o], [StepLR(SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1)]),
            "StepLR.*another optimizer",
        ),
    ],
)
def test_optimizers_that_cannot_be_used(form: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        configure_optimizers(made(form))


def documented() -> dict[str, str]:
    """Return what docs/torch.md says of each method that its table names."""
    rows = re.findall(r"^\| (.*`.*) \| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    return {name: told for names, told in rows for name in re.findall(r"`(\w+)`", names)}


METHODS = sorted(
    name
    for base in lightning.LightningModule.__mro__
    if base.__module__.startswith("lightning")
    for name in vars(base)
    if not name.startswith("_") and callable(getattr(lightning.LightningModule, name))
)
FORMER = [
    *("training_epoch_end", "validation_epoch_end", "training_step_end", "validation_step_end"),
    *("on_epoch_start", "on_epoch_end", "on_batch_start", "on_batch_end"),
]
# Those that a fit does not call, beside what tests and predictions call.
OTHERS = {
    *("forward", "print", "freeze", "unfreeze", "log_dict", "load_from_checkpoint"),
    *("cpu", "cuda", "to", "type", "double", "float", "half"),
    *("to_onnx", "to_tensorrt", "to_torchscript", "save_hyperparameters"),
    *("remove_ignored_hparams",),
}


def with_method(name: str) -> Any:
    return type("Own", (Digits,), {name: lambda self, *given: None, "__module__": __name__})()


@pytest.mark.parametrize("name", [*METHODS, *FORMER])
def test_a_method_is_called_left_alone_or_refused(name: str) -> None:
    told = documented().get(name, "")
    if told.startswith("called") or name in OTHERS or re.search("(^|_)(test|predict)_", name):
        check_module(with_method(name))
        return
    assert told.startswith("refused"), "docs/torch.md does not name it"
    with pytest.raises(ModelError, match=rf"Own\.{name} is not called"):
        check_module(with_method(name))


def test_a_module_that_steps_itself_is_refused() -> None:
    def manual(o: Any) -> Any:
        module.automatic_optimization = False
        return o

    module = made(manual)
    with pytest.raises(ModelError, match="Made.*automatic_optimization = False.*train_step"):
        configure_optimizers(module)
    with pytest.raises(ModelError, match="Made.*automatic_optimization = False.*train_step"):
        check_module(module)


def test_the_trainer_has_what_is_documented() -> None:
    row = next(
        line for line in DOCS.read_text().splitlines() if line.startswith("| `self.trainer`")
    )
    world: Any = SimpleNamespace(Get_size=lambda: 2, Get_rank=lambda: 0)
    facts = TrainerFacts(spec_of([]), world)
    assert set(vars(facts)) == set(re.findall(r"`(\w+)`", row))
    with pytest.raises(ModelError, match=r"trainer\.strategy.*max_epochs"):
        _ = facts.strategy


def annotated() -> Digits:
    return Digits()


def test_modules_say_what_trains_them() -> None:
    functions = (annotated, lambda: Digits(), functools.partial(Digits, rate=0.05))
    for given in (Digits, Digits(), *functions, TorchModel(Digits, clip_norm=1.0)):
        assert engine_of(given) == TORCH
        assert ENGINE.source(given, None).engine == TORCH
    with pytest.raises(ModelError, match="LightningModule.*loss"):
        TorchModel(Digits(), loss="MSELoss")
    with pytest.raises(ModelError, match="LightningModule.*schedule"):
        TorchModel(Digits(), schedule="step")


class Careless(Digits):
    """Does what is of one rank's rows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.means = way, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        image, digit = batch
        if self.way == "summed":
            return nn.functional.cross_entropy(self(image), digit, reduction="sum")
        if self.way == "trainer":
            self.trainer.save_checkpoint("here")
        loss = nn.functional.cross_entropy(self(image), digit)
        self.means.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss" if self.way == "twice" else "val_loss", 1.0)

    def on_validation_epoch_end(self) -> None:
        """Log nothing."""

    def on_train_epoch_end(self) -> None:
        if self.way == "epoch":
            self.log("mean", np.mean(self.means))


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("summed", r"loss.*training_step.*\bsum"),
        ("epoch", "'mean'.*rank 0.*rank 1"),
        ("trainer", r"trainer\.save_checkpoint"),
        ("twice", "'loss'.*training_step.*validation_step"),
        ("best", "best_metric='val_right'.*val_loss"),
    ],
)
def test_what_would_be_wrong_on_several_ranks(
    frame: Any, held: Any, tmp_path: Path, way: str, message: str
) -> None:
    best = CheckpointOptions(best_metric="val_right" if way == "best" else None)
    with pytest.raises((ModelError, InvalidInputError), match=message):
        train(
            frame,
            tmp_path / "run",
            model_fn=lambda: Careless(way),
            epochs=1,
            batch_size=1 if way == "summed" else 32,  # the rows of both ranks tell
            validation=held,
            checkpoints=best,
        )
