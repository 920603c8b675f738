"""Trainers of other libraries, on two ranks, fed from a DataFrame by `Dataset.torch_dataset`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_spark_runner import Dataset, HorovodRunner, prepare_dataset

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

# Of 127 rows, 12 at a time: 10 steps in each of 3 epochs; a checkpoint after the 13th step.
STEPS, EPOCHS, SAVED = 10, 3, 13
Seen = list[list[int]]


@pytest.fixture(scope="module")
def data(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    frame = spark.range(127).selectExpr("id", "array(float(id), float(-id)) as v").repartition(4)
    return prepare_dataset(frame, ["id", "v"], data_dir=str(tmp_path_factory.mktemp("data")))


def run(program: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Return what each rank does."""
    return HorovodRunner(2, stream_logs=False).run(program, *arguments).results


def expected(data: Dataset) -> tuple[Seen, ...]:
    return tuple(
        [
            batch["id"].tolist()
            for epoch in range(EPOCHS)
            for batch in list(data.epoch(epoch, rank=rank, size=2, batch_size=6))[:STEPS]
        ]
        for rank in range(2)
    )


def train_with_lightning(data: Dataset, folder: str, checkpoint: str | None) -> Seen:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    seen: Seen = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            seen.append(batch["id"].tolist())
            loss: Tensor = self.layer(batch["v"]).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        plugins=[TorchElasticEnvironment()],
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=SAVED)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), data.torch_dataset(batch_size=6), ckpt_path=checkpoint)
    return seen


def train_with_hugging_face(data: Dataset, folder: str, checkpoint: str | None) -> Seen:
    from accelerate.data_loader import DataLoaderShard
    from transformers import Trainer, TrainingArguments

    seen: Seen = []

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, v: Tensor, id: Tensor) -> dict[str, Tensor]:
            seen.append(id.tolist())
            return {"loss": self.layer(v).mean()}

    class RowsTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoaderShard(self.train_dataset, device=self.args.device, batch_size=None)

    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        save_steps=SAVED,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = RowsTrainer(Module(), arguments, train_dataset=data.torch_dataset(batch_size=6))
    trainer.train(resume_from_checkpoint=checkpoint)
    return seen


def run_and_resume(
    program: Callable[..., Seen], data: Dataset, folder: Path, checkpoint: str
) -> tuple[Seen, Seen]:
    first = program(data, str(folder), None)
    return first, program(data, str(folder), str(folder / checkpoint))


@pytest.mark.parametrize(
    ("library", "program", "checkpoint"),
    [
        ("lightning", train_with_lightning, f"step={SAVED}.ckpt"),
        pytest.param(
            "accelerate",
            train_with_hugging_face,
            f"checkpoint-{SAVED}",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_trainer_sees_each_row_once_and_resumes_within_an_epoch(
    data: Dataset, tmp_path: Path, library: str, program: Callable[..., Any], checkpoint: str
) -> None:
    pytest.importorskip(library)
    first, resumed = zip(*run(run_and_resume, program, data, tmp_path, checkpoint), strict=True)
    assert first == expected(data)
    assert resumed == tuple(rows[SAVED:] for rows in expected(data))


def train_with_accelerate(rows: Any) -> Seen:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    layer = nn.Linear(2, 1)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 1e-6))
    loader = DataLoaderShard(rows, device=accelerator.device, batch_size=None)
    seen: Seen = []
    for _ in range(EPOCHS):
        for batch in loader:
            seen.append(batch["id"].tolist())
            optimizer.zero_grad()
            accelerator.backward(layer(batch["v"]).mean())
            optimizer.step()
    return seen


@pytest.mark.thorough
def test_a_loop_of_accelerate_sees_each_row_once(data: Dataset) -> None:
    pytest.importorskip("accelerate")
    assert run(train_with_accelerate, data.torch_dataset(batch_size=6)) == expected(data)
