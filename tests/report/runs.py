"""Run directories as trainings leave them, made by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.training.spec import Binding
from horovod_spark_runner.training.time_breakdown import KINDS, Kind, record
from horovod_spark_runner.training.trained_model import Layer, ModelSummary, ModelWriter, Signature

BEGAN = 1_800_000_000.0


def account(ranks: int, number: int) -> dict[str, Any]:
    table = np.zeros((ranks, len(KINDS)))
    for i in range(ranks):
        slow = 0.3 if i == 1 else 0.0
        for kind, seconds in (
            (Kind.DATA, 0.1 + 0.02 * (number % 3)),
            (Kind.COMPUTE, 2.0 + slow),
            (Kind.EXCHANGE, 0.9 - slow),
            (Kind.VALIDATION, 0.4),
            (Kind.CALLBACKS, 0.05),
            (Kind.CHECKPOINT, 0.02),
        ):
            table[i, KINDS.index(kind)] = seconds
    return {
        "time": BEGAN + 20 + 3.5 * number,
        "workers": ranks,
        "samples_per_second": 1000.0 + 10 * math.sin(number),
        "learning_rate": 0.1 * 0.9**number,
        **record(table),
    }


def leave_run(place: Path, epochs: int, *, ranks: int = 4, **settings: Any) -> RunDirectory:
    """Leave a finished run of two attempts."""
    directory = RunDirectory(str(place))
    place.mkdir()
    fit = {"epochs": epochs, "batch_size": 32}
    rows = {"rows": 5000, "validation_rows": 1250}
    directory.write_config({"fit": fit, "num_workers": ranks, **rows, **settings})
    metrics = [
        {
            "loss": 1 / (1 + 0.1 * e) + 0.01,
            "val_loss": 0.3001 if e == epochs - 1 else 0.2742 + 0.01 * abs(e - 28),
            "accuracy": 1 - 1 / (2 + e),
            "val_accuracy": 0.95 - 1 / (2 + e) - 0.001 * (e % 5),
        }
        for e in range(epochs)
    ]
    directory.write_metrics(metrics, [account(ranks, e) for e in range(epochs)])
    common = {"workers": ranks, "started": BEGAN}
    directory.write_attempts(
        [
            {
                **common,
                "number": 1,
                "ended": BEGAN + 60,
                "first_step": 0,
                "last_step": 90,
                "ending": "rank killed or lost",
                "cause": "RankFailedError: rank 3 on node-b was killed by signal 9 <script>",
            },
            {
                **common,
                "number": 2,
                "ended": BEGAN + 160,
                "first_step": 80,
                "last_step": 400,
                "ending": "finished",
            },
        ]
    )
    total = np.zeros((ranks, len(KINDS)))
    total[:, KINDS.index(Kind.BUILD)] = 4.0
    total[:, KINDS.index(Kind.COMPUTE)] = 60.0
    total[:, KINDS.index(Kind.EXCHANGE)] = 20.0
    directory.add_call(
        {
            "began": BEGAN,
            "ended": BEGAN + 180,
            "ending": "finished",
            "seconds": {
                "prepare": 0.5,
                "materialize": 12.0,
                "attempts": 60.0,
                "check": 0.2,
                "slots": 0.0,
                "tasks": 1.0,
                "rendezvous": 0.1,
                "start": 3.0,
                "function": 84.0,
                "results": 1.2,
            },
            "accounts": record(total),
            "placement": [
                {"rank": i, "host": f"node-{'ab'[i % 2]}", "slot": i, "gpus": []}
                for i in range(min(ranks, 100))
            ],
            "workers": ranks,
            "weights": "epoch 29, restored by EarlyStopping (monitors val_loss)",
            "master": "spark://user:secret@master:7077",
            "versions": {"pyspark": "4.3.0", "keras": "3.15.1"},
        }
    )
    leave_model(directory, 3)
    return directory


def leave_model(directory: RunDirectory, layers: int) -> None:
    """Leave the signature of a trained model of so many layers."""
    summary = ModelSummary.of(
        [Layer(f"dense_{i}", "Dense", "(None, 64)", 4160) for i in range(layers)],
        4160 * layers,
        4160,
    )
    ModelWriter(directory).finish(Signature(Binding(["x"]), (), None, summary=summary))
