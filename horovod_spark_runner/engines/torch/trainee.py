"""A PyTorch module as the training loop knows it, and its rank's process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from mpi4py import MPI
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.config_diff import ModelChanges
from ...checkpoint.model_state import Variable
from ...checkpoint.rank_state import JOIN
from ...checkpoint.run_directory import RunDirectory
from ...cluster.worker import side_process
from ...cluster.worker.reporting import notify
from ...config.sync import Allreduce
from ...errors import EnvironmentProblem, ModelError
from ...sync.mpi import shares_gpu
from ...sync.synchroniser import Synchroniser
from ...training.epochs import Step
from ...training.part_comparison import Values
from ...training.progress import Logs
from ...training.spec import OutputSpec, TrainingSpec, WarmStart
from ...training.traces import Timeline
from ...training.trained_model import ModelInputs
from ...training.trainee import Trainee
from .artifact import outputs_of, save_model
from .batch_norm import check_lone_rows, release_norms
from .binding import BatchBinding, InputBinding
from .callbacks import Callbacks, check_callbacks
from .custom_step import CustomSteps
from .engine import SavedModel
from .exchange import TensorCollectives
from .loading import load_initial_weights
from .metrics import Results, is_torchmetrics, training_results
from .model import Modes, preserve_random, seed_generators, usable_threads
from .named_states import NamedStates
from .optimizers import (
    LearningRates,
    OptimizerSettings,
    Schedulers,
    check_complex,
    check_compression,
    check_gradients,
    make_optimizers,
)
from .state import (
    TorchVariables,
    TrainedParameters,
    compare_models,
    describe_model,
    generators,
    separate_generators,
)
from .step import Steps
from .torch_callback import TorchCallback
from .torch_model import TorchModel
from .trial import Recorder, Verdict, try_apart
from .unsaved import UnsavedWatch, keeps_state


def begin(seed: int) -> None:
    """Join Horovod, seed all generators and take this rank's cores.

    Raises:
        EnvironmentProblem: Horovod was built without PyTorch.
    """
    try:
        hvd.init()
    except (AttributeError, ImportError) as error:
        raise EnvironmentProblem(
            f"Horovod was built without PyTorch ({error}); once PyTorch is installed, run "
            "horovod-spark-runner install-horovod"
        ) from error
    TensorCollectives.through_host = shares_gpu(MPI.COMM_WORLD)
    # A copy of a warm process counted the cores before this rank was bound to its own.
    torch.set_num_threads(usable_threads())
    seed_generators(seed)


class TorchTrainee(Trainee):
    """PyTorch implementation of `Trainee`.

    Args:
        spec: the training.
        world: communicator of all ranks.
        synchroniser: what becomes of gradients.
        model: what `build_model` made.
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
        self._callbacks = check_callbacks(spec.config.callbacks)
        self._model, self.module = model, module
        module.train()
        # The GPU that Spark assigned to this rank, if there is one.
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module.to(self._device)
        self._in_step = synchroniser.in_step
        self._together = world.Get_size() if synchroniser.meets_in_every_step else 1
        # Ranks must be able to hold the same weights.
        check_gradients(self.module, alone=self._together == 1 and self._in_step)
        check_complex(self.module, spec.config.sync, world.Get_size())
        self._optimizers = make_optimizers(model, self.module)
        if isinstance(spec.config.sync, Allreduce):
            check_compression(self._model, self._optimizers, spec.config.sync.compression)
        self._schedulers = Schedulers(model, self._optimizers)
        if not self._in_step and self._schedulers.follow_steps:
            raise ModelError(
                "a scheduler that goes on after every step is planned by how many there are, but "
                "with sync=AsyncServer(…) each rank makes as many as it comes to. Give "
                "schedule='epoch', the run's own learning-rate schedule, or sync=Allreduce()"
            )
        self._batches = BatchBinding(self.module, spec, self._device)
        self.columns = self._batches.columns
        together = self._model.sync_batch_norm
        check_lone_rows(self.module, self._batches, spec, world.Get_size(), together=together)
        self._results = self._make_results()
        self._steps = (Steps if model.train_step is None else CustomSteps)(
            self._model,
            self.module,
            self._optimizers,
            self._batches,
            self._results,
            synchroniser,
            world,
            self._device,
        )
        every = list(self._optimizers.values())
        self.variables = TorchVariables(self.module, every)
        self._last_rates: list[float] = []
        self._tried = False
        for each in (self._model.state or {}).values():
            if is_torchmetrics(each):
                each.persistent(mode=True)  # by default, their state_dict is empty
        self._states = self._name_states()
        # Rank 0 warns for all.
        self._unsaved = None
        if world.Get_rank() == 0:
            functions = self._steps.step_functions()
            self._unsaved = UnsavedWatch(
                self.module, functions, self._callbacks, self.saved_objects
            )

    def _name_states(self) -> NamedStates:
        given = {f"state/{name}": one for name, one in (self._model.state or {}).items()}
        objects = {
            **given,
            "settings": OptimizerSettings(self.optimizers),
            **{f"schedulers/{name}": one for name, one in self._schedulers.by_name.items()},
            "trained": TrainedParameters(self.module),
            **{
                f"callbacks/{number:03d}.{type(one).__name__}": one
                for number, one in enumerate(self._callbacks)
            },
        }
        shared = {f"state/{name}": name for name in self._model.state or {}}
        return NamedStates(objects, shared, self._world)

    def _make_results(self) -> Results:
        losses, metrics = training_results(self._model, self._spec.outputs, self._device)
        # With neither, there is a train_step.
        if losses is None and not metrics and self._spec.validation is not None:
            raise ModelError(
                "validation needs a loss or metrics in the TorchModel besides its train_step, "
                "which only trains"
            )
        return Results(losses, [metrics], self._device)

    def train_step(
        self, step: Step, requests: Sequence[bool], last: bool
    ) -> tuple[Logs | None, list[float] | None]:
        counts = self._steps.train(step, requests)
        if self._schedulers:
            self._last_rates = self._rates.read()
            self._schedulers.after_step()
        return self._logs("train"), counts

    def test_step(self, step: Step, last: bool) -> Logs | None:
        self._steps.test(step)
        return self._logs("test")

    def reset_metrics(self) -> None:
        self._results.reset()

    def _logs(self, kind: str) -> Logs:
        return _LazyLogs(lambda: self._results.local(required=self._requires(kind)))

    def _requires(self, kind: str) -> bool:
        """Return whether all losses and metrics are results; those of a custom step may be any."""
        return kind == "test" or self._model.train_step is None

    def results(self, kind: str, logs: Logs | None, fraction: float) -> dict[str, object]:
        parts = [self._world.allgather(one.numpy()) for one in self._results.variables]
        return self._results.merge(parts, required=self._requires(kind))

    def describe(self) -> dict[str, Any]:
        return describe_model(self._model, self.module, self._optimizers, self._schedulers)

    def compare(
        self, then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool
    ) -> ModelChanges:
        return compare_models(then, now, in_epoch=in_epoch)

    def save(self, directory: RunDirectory) -> SavedModel:
        release_norms(self.module)
        if why := save_model(directory, self.module, *self._predicting):
            notify(why)
        return SavedModel()

    def outputs(self) -> Sequence[OutputSpec] | None:
        before = self.variables.capture()
        with preserve_random():
            specs = outputs_of(self.module, *self._predicting)
        self.variables.restore(before)  # a buffer may be changed by any call
        return specs

    @property
    def _predicting(self) -> tuple[ModelInputs, InputBinding]:
        """The module's inputs for prediction, and their feed."""
        return ModelInputs.of_training(self._spec), self._batches.feed

    def hooks(self, *, steps: int, resumed: bool) -> Callbacks:
        return Callbacks(
            self._callbacks,
            self.module,
            self._steps.modes,
            self._states,
            self._unsaved.warn if self._unsaved else lambda: None,
            self._after_epoch,
        )

    def _after_epoch(self, epoch: int, results: Mapping[str, object]) -> None:
        self._schedulers.after_epoch(results, complete=self._spec.has_all_results(epoch))

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

    def tracer(self) -> _TorchTracer:
        return _TorchTracer()

    def learning_rates(self) -> dict[str, float]:
        rates = self._last_rates or self._rates.read()
        if len(rates) == 1:
            return {"learning_rate": rates[0]}
        return {f"learning_rate/{number}": rate for number, rate in enumerate(rates)}

    def load_initial_weights(self, start: WarmStart) -> None:
        load_initial_weights(self.module, start)

    def separate_random_streams(self, rank: int) -> None:
        separate_generators(self._spec.fit.seed, rank)

    def generators(self) -> dict[str, Variable]:
        return generators(self._device)

    def metric_variables(self) -> list[Variable]:
        return [*self._results.variables]

    def metric_merges(self) -> list[str]:
        return [JOIN] * len(self.metric_variables())

    def metric_names(self) -> list[str]:
        return self._results.names

    def probe(self, step: Step) -> Sequence[str]:
        if self._tried or not step.batch.rows:
            return ()
        self._tried = True
        verdict: Verdict | None = None
        if self._world.Get_rank() == 0:
            ranks = self._world.Get_size()
            verdict = try_apart(side_process.take(), self._spec, step, ranks)
        verdict = self._world.bcast(verdict)
        assert verdict is not None
        if verdict.error is not None:
            raise verdict.error
        return verdict.notices

    # -- for trials ----------------------------------------------------------------------------

    @property
    def has_own_step(self) -> bool:
        """Whether a ``train_step`` trains."""
        return self._model.train_step is not None

    @property
    def is_tried_alone(self) -> bool:
        return self.has_own_step

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""
        return list(self._optimizers.values())

    @property
    def has_low_precision(self) -> bool:
        """Whether anything is computed in fewer than 32 bits."""
        narrow = any(p.element_size() < 4 for p in self.module.parameters())
        return self._model.autocast is not None or narrow

    @property
    def trained_by(self) -> str:
        """Source of the gradients, for messages."""
        if self._model.train_step is not None:
            return "the loss in train_step"
        losses = self._results.loss_functions()
        return f"loss {', '.join(repr(name) for name, _ in losses)}" if losses else "the loss"

    @property
    def saved_objects(self) -> list[object]:
        """Objects beside the module whose state checkpoints hold."""
        metrics = self._model.metrics or ()
        held = metrics.values() if isinstance(metrics, Mapping) else metrics
        kept = [
            one
            for one in self._states.objects
            if not isinstance(one, TorchCallback) or keeps_state(one)
        ]
        return [*self.optimizers, *kept, *self._results.objects, *held]

    def step_functions(self) -> list[object]:
        """Return the user's own functions that a training step calls besides the module."""
        return self._steps.step_functions()

    @property
    def modes(self) -> Modes:
        """The module's training and evaluation mode."""
        return self._steps.modes

    def try_step(self, step: Step, recorder: Recorder) -> Values:
        """Compute the gradients of some rows; see `Steps.try_step`."""
        return self._steps.try_step(step, recorder)


class _LazyLogs(Mapping[str, object]):
    """Logs that are computed where somebody looks at them."""

    def __init__(self, compute: Callable[[], Mapping[str, object]]) -> None:
        self._compute = compute

    def __getitem__(self, name: str) -> object:
        return self._compute()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._compute())

    def __len__(self) -> int:
        return len(self._compute())


class _TorchTracer(Timeline):
    """Horovod's timeline, and PyTorch's profiler; see `Tracer`."""

    start_timeline, stop_timeline = Timeline.start, Timeline.stop

    def __init__(self) -> None:
        super().__init__(hvd)
        self._profiler: torch.profiler.profile | None = None

    def start_profile(self) -> None:
        self._profiler = torch.profiler.profile(record_shapes=True)
        self._profiler.start()

    def stop_profile(self, folder: Path, name: str) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        # As TensorBoard's plugin wants it to be called.
        file = folder / f"{socket.gethostname()}.{name}.pt.trace.json"
        self._profiler.export_chrome_trace(str(file))
        self._profiler = None
