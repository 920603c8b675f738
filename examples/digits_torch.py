"""Train a small convolutional PyTorch network on real images, on two ranks of a local Spark.

The images are scikit-learn's 1,797 handwritten digits of 8×8 pixels. Run it with
``python examples/digits_torch.py --workers 2``.
"""

from __future__ import annotations

import argparse
import functools

import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn

from horovod_spark_runner import DataOptions, TorchEarlyStopping, TorchModel, run_training


def make_model() -> TorchModel:
    """Return what is trained; called on every worker."""
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(576, 10),
    )
    return TorchModel(
        network,
        loss="CrossEntropyLoss",
        optimizer=functools.partial(torch.optim.AdamW, lr=2e-3),
        scheduler=functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
        metrics=["accuracy"],
        clip_norm=1.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a CNN on handwritten digits.")
    parser.add_argument("--workers", type=int, default=2, help="ranks (2)")
    parser.add_argument("--epochs", type=int, default=12, help="epochs at most (12)")
    arguments = parser.parse_args()
    session = SparkSession.builder.master(f"local[{arguments.workers}]").appName("digits")
    spark = session.config("spark.ui.showConsoleProgress", "false").getOrCreate()

    digits = load_digits()
    rows = [
        ((image / 16).ravel().tolist(), int(digit))
        for image, digit in zip(digits.images, digits.target, strict=True)
    ]
    df = spark.createDataFrame(rows, "image array<float>, digit int")
    train, test = df.randomSplit([0.8, 0.2], seed=7)
    model = run_training(
        train,
        make_model,
        feature_cols=["image"],
        label_cols=["digit"],
        validation=0.1,
        data=DataOptions(shapes={"image": (1, 8, 8)}),
        num_workers=arguments.workers,
        epochs=arguments.epochs,
        callbacks=[TorchEarlyStopping(patience=3)],
    )
    print(f"Epochs trained: {len(model.summary.history)}")
    print(f"Held-out accuracy: {model.evaluate(test)['accuracy']:.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
