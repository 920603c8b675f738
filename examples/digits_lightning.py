"""Train a `LightningModule` with Lightning's own Trainer, on two ranks of a local Spark.

Lightning's callbacks stop it early and keep the best checkpoint; a second call with the same
``--folder`` resumes from the newest. The images are scikit-learn's 1,797 handwritten digits. Run it
with ``python examples/digits_lightning.py --workers 2``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import Tensor, nn

from horovod_spark_runner import Dataset, HorovodRunner, TorchTransformer, prepare_dataset


class Digits(lightning.LightningModule):
    """A small network, with its loss, its metric and its optimizer."""

    def __init__(self, rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(1152, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.network(image)

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch["image"]), batch["digit"])

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        scores, digit = self(batch["image"]), batch["digit"]
        loss = nn.functional.cross_entropy(scores, digit)
        right = (scores.argmax(1) == digit).float().mean()
        logs = {"val_loss": loss, "val_accuracy": right}
        self.log_dict(logs, batch_size=len(digit), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]


def train(train_rows: Dataset, val_rows: Dataset, epochs: int, folder: str) -> tuple[str, int]:
    """Train on each rank; return the path of the best checkpoint and the trained epochs."""
    best = ModelCheckpoint(folder, "{epoch}", "val_loss", save_last=True)
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=ranks_here,
        num_nodes=int(os.environ["WORLD_SIZE"]) // ranks_here,
        plugins=[TorchElasticEnvironment()],  # the variables RANK, WORLD_SIZE, …
        max_epochs=epochs,
        callbacks=[best, EarlyStopping("val_loss", patience=3)],
        logger=False,
        enable_progress_bar=False,
    )
    newest = Path(folder, "last.ckpt")
    trainer.fit(
        Digits(),
        train_rows.torch_dataset(batch_size=32),
        val_rows.torch_dataset(batch_size=32, shuffle=False),
        ckpt_path=str(newest) if newest.exists() else None,
    )
    return best.best_model_path, trainer.current_epoch


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LightningModule on handwritten digits.")
    parser.add_argument("--workers", type=int, default=2, help="ranks (2)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs at most (8)")
    parser.add_argument(
        "--folder", default="lightning", help="of checkpoints; all ranks must reach it (lightning)"
    )
    arguments = parser.parse_args()
    session = SparkSession.builder.master(f"local[{arguments.workers}]").appName("digits")
    spark = session.config("spark.ui.showConsoleProgress", "false").getOrCreate()

    digits = load_digits()
    rows = [
        ((image / 16).ravel().tolist(), int(digit))
        for image, digit in zip(digits.images, digits.target, strict=True)
    ]
    df = spark.createDataFrame(rows, "image array<float>, digit long")
    parts = df.randomSplit([0.7, 0.1, 0.2], seed=7)
    train_rows, val_rows = (prepare_dataset(part, ["image", "digit"]) for part in parts[:2])
    folder = str(Path(arguments.folder).absolute())
    run = HorovodRunner(num_workers=arguments.workers).run(
        train, train_rows, val_rows, arguments.epochs, folder
    )
    path, epochs = run.result
    print(f"Epochs trained: {epochs}")
    print(f"Best checkpoint: {path}")

    module = Digits.load_from_checkpoint(path, map_location="cpu")
    model = TorchTransformer.from_module(module, ["image"], example=torch.zeros(1, 64))
    accuracy = model.evaluate(parts[2], ["accuracy"], label_cols=["digit"])["accuracy"]
    print(f"Held-out accuracy: {accuracy:.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
