"""A PyTorch module as the training loop knows it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.optim import Optimizer

from ...errors import ModelError
from ...launch.worker.reporting import notify
from ...rundir.directory import RunDirectory
from ...settings.sync import Allreduce
from ..changes import ModelChanges, joined
from ..epochs import Step
from ..logs import Logs
from ..model_inputs import ModelInputs
from ..rank_state import JOIN
from ..spec import OutputSpec, TrainingSpec, WarmStart
from ..state import Variable
from ..sync.synchroniser import Synchroniser
from ..trainee import Trainee
from .artifact import outputs_of, save_module
from .batches import Batches
from .begin import rank_device
from .changes import compare, describe
from .feeding import Feed
from .hooks import TorchHooks, made_callbacks
from .initial_weights import load_initial_weights
from .lightning.recognise import is_lightning
from .lone_rows import check_lone_rows
from .losses import Losses
from .metrics import Metrics, Sums, total_loss
from .optimizers import (
    LearningRates,
    check_complex,
    check_compression,
    check_gradients,
    make_optimizers,
    restore_settings,
    settings_of,
)
from .probe import check_means
from .saved import SavedModule
from .schedulers import Planned, Schedulers, planned_schedulers
from .step import Steps
from .sync_norm import release_norms
from .torch_model import TorchModel
from .tracing import TorchTracer
from .variables import ByteVariable, TorchVariables, trained_in


class TorchTrainee(Trainee):
    """See `Trainee`.

    Args:
        spec: the training.
        world: communicator of all ranks.
        synchroniser: what becomes of gradients.
        model: what `build` made.
        module: the module of it.

    Raises:
        ModelError: the module cannot be trained here, or not on these columns.
        InvalidInputError: something given is no callback.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        world: MPI.Comm,
        synchroniser: Synchroniser,
        model: TorchModel,
        module: nn.Module,
    ) -> None:
        self._spec, self._world = spec, world
        self._rank = world.Get_rank()
        self._callbacks = made_callbacks(spec.callbacks)
        self._model, self.module = model, module
        if not is_lightning(module):  # whose parts stay in the mode that they are in
            module.train()
        self._device = rank_device()
        self.module.to(self._device)
        self._in_step = synchroniser.in_step
        self._together = world.Get_size() if synchroniser.meets_in_every_step else 1
        self._check_weights()
        self._optimizers, planned = self._configured()
        if isinstance(spec.sync, Allreduce):
            check_compression(self._model, self._optimizers, spec.sync.compression)
        self._schedulers = Schedulers(planned)
        if not self._in_step and self._schedulers.follow_steps:
            raise ModelError(
                "a scheduler that goes on after every step is planned by how many there are, but "
                "with sync=AsyncServer(…) each rank makes as many as it comes to. Give "
                "schedule='epoch', the run's own learning-rate schedule, or sync=Allreduce()"
            )
        self._batches = Batches(self.module, spec, self._device)
        self.columns, self.blank = self._batches.columns, self._batches.blank
        together = self._model.sync_batch_norm
        check_lone_rows(self.module, self._batches, spec, world.Get_size(), together=together)
        self._losses = None
        if self._model.loss is not None:
            self._losses = Losses(self._model.loss, spec.outputs).to(self._device)
        self._metrics = Metrics(self._model.metrics, self._device, self._model.loss)
        own = self._model.train_step is not None
        if own and self._losses is None and not self._metrics and spec.validation is not None:
            raise ModelError(
                "validation needs a loss or metrics in the TorchModel besides its train_step, "
                "which only trains"
            )
        self._sums = Sums(self._device)
        self._sums.declare([*self._loss_names, *self._metrics.names])
        every = list(self._optimizers.values())
        self._steps = self._made_steps(
            self._model,
            self.module,
            self._optimizers,
            self._batches,
            self._losses,
            self._metrics,
            self._sums,
            synchroniser,
            world,
            self._device,
        )
        self.variables = TorchVariables(self.module, every)
        self._begun = [settings_of(optimizer) for optimizer in every]
        self._begun_trained = trained_in(self.module)
        self._last_rates: list[float] = []
        self._taken, self._told = 0, set[str]()

    def _check_weights(self) -> None:
        """Check that ranks can hold the same weights."""
        check_gradients(self.module, self._together, in_step=self._in_step)
        check_complex(self.module, self._spec.sync)

    def _configured(self) -> tuple[dict[str, Optimizer], dict[str, Planned]]:
        """Return the optimizers, by name, and the schedulers."""
        optimizers = make_optimizers(self._model, self.module)
        return optimizers, planned_schedulers(self._model, optimizers)

    def _made_steps(self, *given: Any) -> Steps:
        """Return what steps, given all that `Steps` takes."""
        return Steps(*given)

    @property
    def _loss_names(self) -> list[str]:
        return [] if self._losses is None else self._losses.names

    def train_step(
        self, step: Step, asked: Sequence[bool], last: bool
    ) -> tuple[Logs | None, list[float] | None]:
        self._try_again(step)
        counts = self._steps.train(step, asked)
        if self._schedulers:
            self._last_rates = self._rates.read()
            self._schedulers.after_step(step.number)
        return self._logs("train"), counts

    def test_step(self, step: Step, last: bool) -> Logs | None:
        self._steps.test(step)
        return self._logs("test")

    def reset_metrics(self) -> None:
        self._sums.reset()
        self._metrics.states.reset()

    def _logs(self, kind: str) -> Logs:
        return Later(lambda: {**self._means(kind), **self._metrics.computed_here()})

    def _means(self, kind: str, summed: np.ndarray | None = None) -> dict[str, float]:
        """Return what is a mean, of sums over all ranks or, without them, of this one's."""
        own = kind == "train" and self._model.train_step is not None  # which reports what it likes
        asked = () if own else (*self._loss_names, *self._metrics.names)
        return total_loss(self._sums.results(summed, asked=asked), self._loss_names)

    def results(self, kind: str, logs: Logs | None, fraction: float) -> dict[str, object]:
        names = self._world.allgather(self._sums.names)
        if any(own != names[0] for own in names):
            raise ModelError(
                "train_step must report the same names on all ranks, but rank 0 has "
                f"{', '.join(names[0])} and others {joined(sorted({str(n) for n in names[1:]}))}"
            )
        summed = np.zeros(self._sums.shape)
        self._world.Allreduce(self._sums.numpy(), summed)
        results: dict[str, object] = dict(self._means(kind, summed))
        if self._metrics.states:
            states = self._world.allgather(self._metrics.states.numpy())
            results.update(self._metrics.computed(states))
        return results

    def describe(self) -> dict[str, Any]:
        return describe(self._model, self.module, self._optimizers, self._schedulers)

    def compare(
        self, then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool
    ) -> ModelChanges:
        return compare(then, now, in_epoch=in_epoch)

    def save(self, directory: RunDirectory) -> SavedModule:
        release_norms(self.module)
        if why := save_module(directory, self.module, *self._predicting):
            notify(why)
        return SavedModule()

    def outputs(self) -> Sequence[OutputSpec] | None:
        before = self.variables.capture()
        with random_kept():
            found = outputs_of(self.module, *self._predicting)[0]
        self.variables.restore(before)  # a buffer may be changed by any call
        return found

    @property
    def _predicting(self) -> tuple[ModelInputs, Feed, str]:
        """What the module takes when it predicts, how columns are fed to it, and autocast."""
        inputs = ModelInputs.of_training(self._spec)
        return inputs, self._batches.feed, self._model.autocast or ""

    def hooks(self, *, steps: int, resumed: bool) -> TorchHooks:
        return TorchHooks(
            self._callbacks,
            self.module,
            self._steps.modes,
            self._capture,
            self._restore,
            self._schedulers.after_epoch,
        )

    def _capture(self) -> dict[str, Any]:
        return {
            "begun": self._begun,
            "now": [settings_of(optimizer) for optimizer in self._optimizers.values()],
            "schedulers": self._schedulers.capture(),
            "results": self._sums.names,
            "trained": dict(trained_in(self.module).items() - self._begun_trained.items()),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        every = self._optimizers.values()
        for optimizer, begun, now in zip(every, state["begun"], state["now"], strict=True):
            restore_settings(optimizer, begun, now)
        self._schedulers.restore(state["schedulers"])
        for name, trained in state["trained"].items():
            self.module.get_parameter(name).requires_grad_(trained)
        # Within an epoch the sums that follow are those of these names, in their order.
        self._sums.names = []
        self._sums.declare([*state["results"], *self._loss_names, *self._metrics.names])

    @property
    def _rates(self) -> LearningRates:
        return LearningRates(list(self._optimizers.values()))

    def rates(self, scaling: str) -> LearningRates:
        if self._schedulers:
            raise ModelError(
                f"lr_scaling={scaling!r} is for models without a scheduler, which would set the "
                "rate anew; scale it in model_fn, or in the scheduler"
            )
        return self._rates

    def exchange_seconds(self) -> float | None:
        return self._steps.exchange.seconds

    def tracer(self) -> TorchTracer:
        return TorchTracer()

    def learning_rates(self) -> dict[str, float]:
        rates = self._last_rates or self._rates.read()
        if len(rates) == 1:
            return {"learning_rate": rates[0]}
        return {f"learning_rate/{number}": rate for number, rate in enumerate(rates)}

    def load_initial_weights(self, start: WarmStart) -> None:
        load_initial_weights(self.module, start)

    def separate(self, rank: int) -> None:
        if rank:
            stream = np.random.SeedSequence([self._spec.fit.seed, rank])
            torch.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def generators(self) -> dict[str, Variable]:
        found: dict[str, Variable] = {"torch": _GeneratorState("torch", "cpu")}
        if self._device.type == "cuda":
            found["cuda"] = _GeneratorState("cuda", "cuda")
        return found

    def metric_variables(self) -> list[Variable]:
        return [self._sums, self._metrics.states] if self._metrics.states else [self._sums]

    def metric_merges(self) -> list[str]:
        return ["sum", JOIN] if self._metrics.states else ["sum"]

    def metric_names(self) -> list[str]:
        return [*self._sums.names, *self._metrics.of_objects]

    def probe(self, step: Step) -> None:
        losses = [] if self._losses is None else self._losses.functions()
        functions = [*losses, *self._metrics.functions()]
        if step.batch.rows < 2 or self._model.train_step is not None or not functions:
            return
        batch = self._batches.of(step.batch.arrays, training=False)
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with random_kept():
            outputs = self._steps.evaluated(batch)
            for text in check_means(functions, outputs, self._batches.target(batch)):
                if text not in self._told:
                    notify(text)
                self._told.add(text)
        for name, buffer in self.module.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])

    def _try_again(self, step: Step) -> None:
        """Try functions on rows of the 2nd, 4th, 8th, … step: the first may have none to ignore."""
        self._taken += 1
        due = self._taken > 1 and not self._taken & (self._taken - 1)
        if due and self._rank == 0 and self._world.Get_size() > 1:
            TorchTrainee.probe(self, step)


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Leave the random generators as they are."""
    state = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])


class _GeneratorState(ByteVariable):
    """The state of a generator of PyTorch's."""

    def __init__(self, path: str, device: str) -> None:
        self.path = path
        self._cuda = device == "cuda"

    def numpy(self) -> np.ndarray:
        state = torch.cuda.get_rng_state() if self._cuda else torch.get_rng_state()
        found: np.ndarray = state.numpy()
        return found

    def assign(self, value: np.ndarray) -> None:
        state = torch.from_numpy(np.array(value, np.uint8))
        if self._cuda:
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


class Later(Mapping[str, object]):
    """Logs that are computed where somebody looks at them."""

    def __init__(self, compute: Callable[[], Mapping[str, object]]) -> None:
        self._compute = compute

    def __getitem__(self, name: str) -> object:
        return self._compute()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._compute())

    def __len__(self) -> int:
        return len(self._compute())
