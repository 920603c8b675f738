"""PyTorch models of the tests, and callbacks that note what becomes of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from horovod_spark_runner import TorchCallback, TorchModel
from horovod_spark_runner.sync import allreduce
from horovod_spark_runner.testing import Faults


def flat_weights(module: nn.Module) -> np.ndarray:
    """Return all parameters of a module as one array."""
    return np.concatenate([p.detach().numpy().ravel() for p in module.parameters()])


class Recorder(TorchCallback):
    """Writes the weights after every step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, list[np.ndarray]()

    def on_train_begin(self, module: nn.Module) -> None:
        self.module = module

    def on_step_end(self, step: int, logs: Mapping[str, Any]) -> None:
        self.steps.append(flat_weights(self.module))

    def on_train_end(self) -> None:
        from mpi4py import MPI

        np.save(self.folder / f"rank-{MPI.COMM_WORLD.Get_rank()}.npy", np.stack(self.steps))


class FaultAt(TorchCallback):
    """Lets faults happen, by the step of the whole run, once the checkpoint ``kept`` is there."""

    def __init__(self, faults: Faults, kept: Path) -> None:
        self.faults, self.kept, self.step = faults, kept, 0

    def on_step_end(self, step: int, logs: Mapping[str, Any]) -> None:
        from mpi4py import MPI

        self.step += 1
        first = min(fault.step for fault in self.faults.faults)
        while self.step == first and not (self.kept.exists() or Path(self.faults.notes).exists()):
            time.sleep(0.01)
        self.faults.after_step(self.step, MPI.COMM_WORLD.Get_rank())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def digits_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def digits_model(optimizer: str = "sgd", **fields: Any) -> TorchModel:
    """Return a small network for the digits, the same whenever it is built."""
    chosen = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adam": functools.partial(torch.optim.Adam, lr=0.01),
    }[optimizer]
    given: dict[str, Any] = {"loss": "CrossEntropyLoss", "optimizer": chosen, **fields}
    return TorchModel(digits_net(), metrics=["accuracy"], **given)


def random_model(rate: float = 0.01) -> TorchModel:
    """Return a network with statistics and dropout, whose result depends on ranks."""
    module = nn.Sequential(
        nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9], gamma=0.5)
    return TorchModel(
        module, "CrossEntropyLoss", optimizer, scheduler, schedule="step", metrics=["accuracy"]
    )


class TwoHeads(nn.Module):
    """Two inputs, two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(64 + 4, 8)
        self.number = nn.Linear(8, 1)
        self.kind = nn.Linear(8, 10)

    def forward(self, image: Tensor, group: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.body(torch.cat([image, self.embedding(group)], 1)))
        return {"number": self.number(hidden), "kind": self.kind(hidden)}


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64))
        self.judge = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, image: Tensor) -> Tensor:
        judged: Tensor = self.judge(image)
        return judged


def adversaries() -> TorchModel:
    pair = Pair()

    def train_step(step: Any) -> dict[str, Tensor]:
        (real,) = step.inputs
        # The same noise on any number of ranks: it follows from the images.
        fake = pair_of(step).generator(real[:, :8] - real[:, 8:16])
        loss = nn.functional.binary_cross_entropy_with_logits
        judge, generator = step.optimizers["judge"], step.optimizers["generator"]
        judged = pair_of(step).judge(torch.cat([real, fake.detach()]))
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        judge.zero_grad()
        of_judge = loss(judged, wanted)
        of_judge.backward()  # type: ignore[no-untyped-call]
        judge.step()
        generator.zero_grad()
        of_generator = loss(pair_of(step).judge(fake), torch.ones(len(real), 1))
        of_generator.backward()  # type: ignore[no-untyped-call]
        generator.step()
        return {"judge": of_judge.detach(), "generator": of_generator.detach()}

    return TorchModel(
        pair,
        optimizer={
            "generator": torch.optim.Adam(pair.generator.parameters(), lr=0.01),
            "judge": torch.optim.Adam(pair.judge.parameters(), lr=0.01),
        },
        train_step=train_step,
    )


def pair_of(step: Any) -> Pair:
    found: Pair = step.module
    return found


class Recomputed(nn.Module):
    """A layer that is used twice, in parts that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(image))
        for _ in range(2):
            hidden = checkpoint(self.twice, hidden, use_reentrant=True)
        last: Tensor = self.last(hidden)
        return last


def recomputed_model() -> TorchModel:
    """Return a `Recomputed` whose parameters have a bucket each."""
    allreduce.BUCKET_BYTES = 1
    return TorchModel(Recomputed(), "CrossEntropyLoss", "SGD")
