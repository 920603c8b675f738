"""N ranks with batch B train exactly what plain PyTorch trains with batch N·B."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_spark_runner import (
    Allreduce,
    CheckpointOptions,
    DataOptions,
    ModelError,
    RanksDivergedError,
    RestartOptions,
    TorchCallback,
    TorchModel,
    TorchTransformer,
)
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch
from horovod_spark_runner.sync import allreduce
from horovod_spark_runner.testing import Fault, Faults
from tests.torch.models import (
    FaultAt,
    Recorder,
    TwoHeads,
    adversaries,
    digits_model,
    digits_net,
    flat_weights,
    recomputed_model,
)
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

GLOBAL_BATCH = 24
ROWS = 4 * GLOBAL_BATCH + 19
EPOCHS = 2


def recorded(
    frame: Any,
    folder: Path,
    model_fn: Callable[[], TorchModel],
    world: int,
    callbacks: Sequence[TorchCallback] = (),
    **more: Any,
) -> tuple[list[np.ndarray], Any]:
    """Train on ``world`` ranks; return the weights of each rank after every step."""
    folder.mkdir(parents=True, exist_ok=True)
    transformer = train(
        frame,
        folder / "run",
        model_fn=model_fn,
        num_workers=world,
        batch_size=GLOBAL_BATCH // world,
        epochs=EPOCHS,
        data=DataOptions(keep_data=True),
        callbacks=[*callbacks, Recorder(folder)],
        **more,
    )
    return [np.load(folder / f"rank-{rank}.npy") for rank in range(world)], transformer


def batches(run: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the global batches of a run, in its order."""
    manifest = Manifest.from_json(next(run.glob("data/data-*/manifest.json")).read_text())
    for epoch in range(EPOCHS):
        plan = plan_epoch(
            [(group.rows, group.size) for group in manifest.row_groups],
            global_batch=GLOBAL_BATCH,
            seed=0,
            epoch=epoch,
            window_bytes=256 * 1024 * 1024,
        )
        for batch in DatasetReader(manifest).epoch(plan, 0, 1):
            yield {name: torch.from_numpy(a.copy()) for name, a in batch.arrays.items()}


def plain_torch(run: Path, model: TorchModel, loss: Callable[..., torch.Tensor]) -> np.ndarray:
    """Feed PyTorch alone the batches of a run; return the weights after each."""
    module = model.module
    assert isinstance(module, nn.Module)
    assert callable(model.optimizer)
    optimizer = model.optimizer(module.parameters())
    steps = []
    for batch in batches(run):
        optimizer.zero_grad()
        loss(module, batch).backward()  # type: ignore[no-untyped-call]
        if model.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), model.clip_norm)
        optimizer.step()
        steps.append(flat_weights(module))
    return np.stack(steps)


def cross_entropy(module: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch["image"]), batch["digit"].long())


@pytest.fixture(autouse=True)
def own_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what models of ranks set, which are also made here."""
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", allreduce.BUCKET_BYTES)


@pytest.fixture(scope="module")
def frame(digits_df: Any) -> Any:
    return digits_df.filter(f"id < {ROWS}").cache()


@pytest.mark.parametrize(
    ("optimizer", "world", "clip"), [("sgd", 2, None), ("sgd", 3, 0.5), ("adam", 3, None)]
)
def test_ranks_equal_plain_torch(
    frame: Any, tmp_path: Path, optimizer: str, world: int, clip: float | None
) -> None:
    def model_fn() -> TorchModel:
        return digits_model(optimizer, clip_norm=clip)

    weights, transformer = recorded(frame, tmp_path, model_fn, world)
    expected = plain_torch(tmp_path / "run", model_fn(), cross_entropy)
    assert len(expected) == EPOCHS * 5
    for other in weights[1:]:
        np.testing.assert_array_equal(other, weights[0])  # after every step, to the bit
    np.testing.assert_allclose(weights[0], expected, rtol=0, atol=2e-5)
    assert not np.allclose(weights[0][0], weights[0][-1], atol=1e-2), "nothing was learnt"
    history = transformer.summary.history
    assert set(history[0]) == {"loss", "accuracy"}
    assert history[-1]["loss"] < history[0]["loss"]


@pytest.mark.thorough
def test_fewer_rows_in_the_last_batch_than_ranks(digits_df: Any, tmp_path: Path) -> None:
    """Four global batches and one row more: two of three ranks have none in the last step.

    Two labels of three are ignored, that of the last row among them.
    """
    rows = digits_df.filter(f"id < {4 * GLOBAL_BATCH + 1}")
    frame = rows.selectExpr("image", "if(id % 3 = 0, digit, -100) as digit")
    weights, _ = recorded(frame, tmp_path, digits_model, 3)
    last = [batch["digit"].tolist() for batch in batches(tmp_path / "run")][4::5]
    assert [-100] in last, "the last row counts in all epochs"
    expected = plain_torch(tmp_path / "run", digits_model(), cross_entropy)
    assert np.abs(expected[4] - expected[3]).max() > 1e-3, "the last step changes nothing"
    for ours in weights:
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_a_sum_over_fewer_rows_than_ranks(
    digits_df: Any, digits: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    """The last batch, and the only one of the validation, are of one row."""

    def summing() -> TorchModel:
        still = functools.partial(torch.optim.SGD, lr=1e-30)
        return TorchModel(digits_net(), nn.CrossEntropyLoss(reduction="sum"), still)

    run = train(
        digits_df.filter(f"id <= {GLOBAL_BATCH}"),
        tmp_path,
        model_fn=summing,
        batch_size=GLOBAL_BATCH // 2,
        epochs=1,
        validation=digits_df.filter("id = 1"),
    )
    images, labels = (torch.from_numpy(one[: GLOBAL_BATCH + 1]) for one in digits)
    outputs = digits_net()(images.float())
    each = nn.functional.cross_entropy(outputs, labels.long(), reduction="none").detach()
    (logs,) = run.summary.history
    assert logs["loss"] == pytest.approx(float(each.sum()) / 2, rel=1e-5)  # of two batches
    assert logs["val_loss"] == pytest.approx(float(each[1]), rel=1e-5)


def without_exchange() -> TorchModel:
    """Return the network, and let this rank keep its gradients to itself."""
    from horovod_spark_runner.sync.allreduce import AllreduceSynchroniser

    def gradients(
        self: Any, gradients: Any, share: Any, name: str, place: str, along: Any = ()
    ) -> Any:
        return list(gradients), self._collectives.sum(along, name)

    AllreduceSynchroniser.gradients = gradients  # type: ignore[method-assign]
    return digits_model()


def test_without_the_exchange_the_run_ends_after_the_first_step(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(RanksDivergedError, match=r"first step.*\d+ of .*rank 1\b.*'0.w"):
        recorded(frame, tmp_path, without_exchange, 2)


WEIGHTS = torch.linspace(0.2, 3.0, 10)


@pytest.mark.thorough
def test_a_loss_that_divides_by_weights_of_classes(frame: Any, tmp_path: Path) -> None:
    """In half precision, and in buckets that leave before the backward pass has ended."""

    def model_fn() -> TorchModel:
        allreduce.BUCKET_BYTES = 1
        loss = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=4)
        return digits_model(loss=loss)

    def expected_loss(module: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=4)
        found: torch.Tensor = loss(module(batch["image"]), batch["digit"].long())
        return found

    weights, _ = recorded(frame, tmp_path, model_fn, 2)
    expected = plain_torch(tmp_path / "run", digits_model(), expected_loss)
    np.testing.assert_allclose(weights[0], expected, rtol=0, atol=2e-5)
    halved, _ = recorded(frame, tmp_path / "fp16", model_fn, 2, sync=Allreduce(compression="fp16"))
    np.testing.assert_array_equal(halved[1], halved[0])
    assert np.abs(halved[0] - expected).max() > 2e-5
    np.testing.assert_allclose(halved[0], expected, rtol=0, atol=5e-3)


@pytest.mark.thorough
def test_a_gradient_that_comes_in_parts(frame: Any, tmp_path: Path) -> None:
    """Its first part has left already: refused by name."""
    said = "gradient.*'twice.(weight|bias)'.*use_reentrant=False"
    with pytest.raises(ModelError, match=said):
        recorded(frame, tmp_path, recomputed_model, 2)


class Thawed(nn.Module):
    """Its first layer is trained later; a buffer is set in every step.

    Another one is a mask as of attention, with infinities.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
        self.first.requires_grad_(requires_grad=False)
        self.centre: torch.Tensor
        self.register_buffer("centre", torch.zeros(64))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(image - self.centre)))
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * image.mean(0)
        return found


class Thawing(TorchCallback):
    def on_train_begin(self, module: nn.Module) -> None:
        self.module: Any = module

    def on_epoch_begin(self, epoch: int) -> None:
        self.module.first.requires_grad_(requires_grad=epoch == 1)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self.module.eval()  # for numbers of its own, and forgets to go back


def thawed() -> TorchModel:
    allreduce.BUCKET_BYTES = 1
    sgd = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)
    return TorchModel(Thawed(), "CrossEntropyLoss", sgd)


@pytest.mark.thorough
def test_layers_that_are_trained_later_and_buffers_that_are_set(
    digits_df: Any, tmp_path: Path
) -> None:
    frame = digits_df.filter(f"id < {4 * GLOBAL_BATCH}")  # equal parts: means of them are the mean
    weights, transformer = recorded(frame, tmp_path, thawed, 2, callbacks=[Thawing()])
    module, steps = Thawed(), 0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    for batch in batches(tmp_path / "run"):
        module.first.requires_grad_(requires_grad=steps >= 4)
        optimizer.zero_grad()
        cross_entropy(module, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for ours in weights:
            np.testing.assert_allclose(ours[steps], flat_weights(module), rtol=0, atol=2e-5)
        steps += 1
    assert steps == EPOCHS * 4
    assert not torch.equal(module.first.weight, Thawed().first.weight), "it was not trained"
    trained = transformer.getModel()
    np.testing.assert_allclose(trained.get_buffer("centre"), module.centre, rtol=0, atol=1e-6)
    assert torch.equal(trained.get_buffer("mask"), module.get_buffer("mask"))


def two_heads() -> TorchModel:
    return TorchModel(
        TwoHeads(),
        loss={"kind": "CrossEntropyLoss", "number": nn.MSELoss(reduction="sum")},
        optimizer=plain_sgd,
    )


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001)


@pytest.mark.thorough
def test_several_inputs_and_outputs_and_weights_of_rows(frame: Any, tmp_path: Path) -> None:
    columns = frame.selectExpr(
        "image", "id % 7 as shift", "digit", "float(id % 5) as size", "float(1 + id % 3) as heavy"
    )
    weights, transformer = recorded(
        columns,
        tmp_path,
        two_heads,
        3,
        feature_cols={"group": "shift", "image": "image"},
        label_cols={"number": "size", "kind": "digit"},
        sample_weight_col="heavy",
    )

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        given = module(batch["image"], batch["shift"])
        heavy = batch["heavy"]
        kinds = nn.functional.cross_entropy(given["kind"], batch["digit"].long(), reduction="none")
        squares = (given["number"][:, 0] - batch["size"]).square()
        total: torch.Tensor = (heavy * kinds).mean() + (heavy * squares).sum()
        return total

    expected = plain_torch(tmp_path / "run", two_heads(), loss)
    np.testing.assert_allclose(weights[0], expected, rtol=0, atol=3e-5)
    assert set(transformer.summary.history[0]) == {"loss", "kind_loss", "number_loss"}


@pytest.mark.thorough
def test_adversaries_train_in_a_step_of_their_own(frame: Any, tmp_path: Path) -> None:
    """Without any label, and with a rank that has no rows in the last step."""
    images = frame.filter(f"id < {2 * GLOBAL_BATCH + 1}")
    two, _ = recorded(images, tmp_path / "two", adversaries, 2, label_cols=None)
    one, transformer = recorded(images, tmp_path / "one", adversaries, 1, label_cols=None)
    np.testing.assert_array_equal(two[0], two[1])
    np.testing.assert_allclose(two[0], one[0], rtol=0, atol=2e-4)
    assert set(transformer.summary.history[0]) == {"judge", "generator"}
    first = flat_weights(copy.deepcopy(adversaries().module))  # type: ignore[arg-type]
    changed = np.abs(one[0][-1] - first) > 1e-3
    for part in np.array_split(changed, 2):  # of the generator, and of the judge
        assert part.mean() > 0.5


class Brightness(nn.Module):
    """Takes the logarithm of what no row may be: all zero."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + image.sum(1, keepdim=True).log()


def normalised(sync: bool) -> TorchModel:
    allreduce.BUCKET_BYTES = 1
    torch.manual_seed(11)
    module = nn.Sequential(
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.Sigmoid(),
        Brightness(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 10),
    )
    module = nn.Sequential(Brightness(), *module)
    return TorchModel(module, "CrossEntropyLoss", plain_rate, sync_batch_norm=sync)


def plain_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


@pytest.mark.thorough
def test_moments_of_the_global_batch(digits_df: Any, tmp_path: Path) -> None:
    """Ranks of one row, and of none, in the last step."""
    frame = digits_df.filter(f"id < {4 * GLOBAL_BATCH + 2}")
    weights, _ = recorded(frame, tmp_path, lambda: normalised(True), 3)
    expected = plain_torch(tmp_path / "run", normalised(True), cross_entropy)
    for ours in weights:
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)
    program = TorchTransformer.from_run(tmp_path / "run", trusted=True)
    model = program.getModel()
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    one_more = digits_df.filter(f"id < {4 * GLOBAL_BATCH + 1}")
    with pytest.raises(ModelError, match=r"all ranks.*row.*batch_size(?!.*sync_batch_norm)"):
        recorded(one_more, tmp_path / "lone", lambda: normalised(True), 3)
    with pytest.raises(ModelError, match=r"98 rows.*\b24\b.*rank"):
        recorded(frame, tmp_path / "alone", lambda: normalised(False), 3)


class Tracker:
    """A count and a random generator of a step's own."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, np.random.default_rng(0)

    def draw(self) -> float:
        self.calls += 1
        return self.generator.random()

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls, self.generator.bit_generator.state = state["calls"], state["generator"]


def beside_the_module() -> TorchModel:
    """A step that changes a scheduler, an average and a generator of its own.

    Every third step trains on noise, too, as a generator is trained less often than its judge.
    """
    torch.manual_seed(0)
    module = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 8))
    average: Any = torch.optim.swa_utils.AveragedModel(module)
    tracker = Tracker()

    def train_step(step: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        drawn = tracker.draw()
        loss = nn.functional.cross_entropy(step.outputs(), step.labels[0])
        total: Any = loss + drawn * module.weight.square().mean() * (tracker.calls % 3 == 0)
        total.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(module)
        return {
            "loss": loss,
            "rate": optimizer.param_groups[0]["lr"],
            "averaged": average.n_averaged,
            "average": average.module.weight.abs().sum().detach(),
            "calls": tracker.calls,
            "drawn": drawn,
        }

    state = {"schedule": schedule, "average": average, "tracker": tracker}
    return TorchModel(module, optimizer=optimizer, train_step=train_step, state=state)


def test_what_is_beside_the_module_changes_by_the_training_alone(
    frame: Any, tmp_path: Path
) -> None:
    histories = []
    for world in (1, 2):
        place = tmp_path / str(world)
        _, transformer = recorded(frame, place, beside_the_module, world)
        histories.append(transformer.summary.history)
    for one, other in zip(*histories, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    steps = -(-ROWS // GLOBAL_BATCH)
    expected = np.mean([min(1.0, (n + 2) / 8) * 0.1 for n in range(steps)])
    assert histories[0][0]["calls"] == pytest.approx((steps + 1) / 2, rel=0.1)
    assert histories[0][0]["rate"] == pytest.approx(expected, rel=0.1)


def test_what_is_beside_the_module_resumes_to_the_bit(frame: Any, tmp_path: Path) -> None:
    faults = Faults((Fault(7, rank=1),), str(tmp_path / "notes"))
    given: dict[str, Any] = {"checkpoints": CheckpointOptions(every_steps=2)}
    kept = tmp_path / "struck" / "run" / "checkpoints" / "step-00000004"
    restarts = RestartOptions(max_restarts=1, backoff_seconds=0.1)
    _, struck = recorded(
        frame,
        tmp_path / "struck",
        beside_the_module,
        2,
        [FaultAt(faults, kept)],
        restarts=restarts,
        **given,
    )
    _, whole = recorded(frame, tmp_path / "whole", beside_the_module, 2, **given)
    assert len(struck.summary.attempts) == 2
    assert struck.summary.history == whole.summary.history
