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
from ...checkpoint.rank_state import JOIN, SMALL
from ...checkpoint.run_directory import RunDirectory
from ...cluster.worker import side_process
from ...cluster.worker.reporting import notify
from ...config.sync import Allreduce
from ...errors import EnvironmentProblem, ModelError, RanksDivergedError
from ...storage.arrays import Arrays
from ...sync.mpi import shares_gpu
from ...sync.synchroniser import Synchroniser
from ...training.agreement import checksum
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
from .optimizers import (
    LearningRates,
    Schedule,
    Schedulers,
    check_complex,
    check_compression,
    check_gradients,
    make_optimizers,
    make_schedulers,
    restore_settings,
    settings_of,
)
from .packing import pack_state, unpack_state
from .state import (
    TorchVariables,
    compare_models,
    describe_model,
    generators,
    separate_generators,
    trained_in,
)
from .step import Steps
from .torch_callback import TorchCallback
from .torch_model import TorchModel, is_lightning
from .trial import Recorder, Verdict, try_apart
from .unsaved import changed_values, objects_with_state, unsaved_values


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


# Of values that a warning names.
_MOST_SHOWN = 5


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
        if not is_lightning(module):  # whose parts stay in the mode that they are in
            module.train()
        # The GPU that Spark assigned to this rank, if there is one.
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module.to(self._device)
        self._in_step = synchroniser.in_step
        self._together = world.Get_size() if synchroniser.meets_in_every_step else 1
        self._check_weights()
        self._optimizers, schedules = self._configure()
        if isinstance(spec.config.sync, Allreduce):
            check_compression(self._model, self._optimizers, spec.config.sync.compression)
        self._schedulers = Schedulers(schedules)
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
        self._steps = self._make_steps(
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
        self._initial_settings = [settings_of(optimizer) for optimizer in every]
        self._initially_trained = trained_in(self.module)
        self._last_rates: list[float] = []
        self._tried = False
        # Rank 0 reports them for all.
        saved = [self.module, *self.saved_objects]
        self._beside = [] if self._world.Get_rank() else objects_with_state(saved)
        self._unsaved = {} if self._world.Get_rank() else self._find_unsaved()
        self._reported: set[str] = set()
        self._warned_of_unequal = False
        for each in (self._model.state or {}).values():
            if is_torchmetrics(each):
                each.persistent(mode=True)  # by default, their state_dict is empty

    def _check_weights(self) -> None:
        """Check that ranks can hold the same weights."""
        check_gradients(self.module, alone=self._together == 1 and self._in_step)
        check_complex(self.module, self._spec.config.sync, self._world.Get_size())

    def _configure(self) -> tuple[dict[str, Optimizer], dict[str, Schedule]]:
        """Return the optimizers, by name, and the schedulers."""
        optimizers = make_optimizers(self._model, self.module)
        return optimizers, make_schedulers(self._model, optimizers)

    def _make_results(self) -> Results:
        losses, metrics = training_results(self._model, self._spec.outputs, self._device)
        # With neither, there is a train_step.
        if losses is None and not metrics and self._spec.validation is not None:
            raise ModelError(
                "validation needs a loss or metrics in the TorchModel besides its train_step, "
                "which only trains"
            )
        return Results(losses, [metrics], self._device)

    def _make_steps(self, *args: Any) -> Steps:
        """Return the `Steps`, from its arguments."""
        return (Steps if self._model.train_step is None else CustomSteps)(*args)

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
        return self._make_hooks(
            self._callbacks,
            self.module,
            self._steps.modes,
            self._capture,
            self._restore,
            self._after_epoch,
        )

    def _make_hooks(self, *args: Any) -> Callbacks:
        """Return the `Callbacks`, from its arguments."""
        return Callbacks(*args)

    def _after_epoch(self, epoch: int, results: Mapping[str, object]) -> None:
        self._schedulers.after_epoch(results, complete=self._spec.has_all_results(epoch))

    def _warn_of_unsaved(self) -> None:
        """Warn of values that checkpoints do not hold, each once, if training has changed them."""
        if self._world.Get_rank():
            return
        now = self._find_unsaved()
        owners = tuple(self._reported)
        changed = [n for n in changed_values(self._unsaved, now) if not n.endswith(owners)]
        self._reported.update(name.partition(" in ")[2] or name for name in changed)
        self._unsaved = {**now, **self._unsaved}
        if changed:
            shown = ", ".join(changed[:_MOST_SHOWN]) + (" …" if changed[_MOST_SHOWN:] else "")
            notify(
                f"training has changed values that are not in checkpoints: {shown}. A resumed run "
                "starts with their first values, and each rank has its own. Make what the training "
                "depends on a persistent buffer of the module, or keep it in an object with "
                "state_dict and load_state_dict, TorchModel(state={…})"
            )

    def _find_unsaved(self) -> dict[str, bytes]:
        """Return fingerprints of what checkpoints do not hold, by name."""
        # Attributes of callbacks without a state_dict of their own.
        stateless = [one for one in self._callbacks if not _keeps_state(one)]
        others = {
            f"callback {type(one).__name__}": {
                **vars(type(one)),
                **vars(one),
                "stop_training": None,
            }
            for one in stateless
        }
        searched = [*self._steps.step_functions(), others]
        return unsaved_values(self.module, searched, self.saved_objects, self._beside)

    def _capture(self, arrays: Arrays) -> dict[str, Any]:
        self._warn_of_unsaved()
        state = {
            name: pack_state(each.state_dict(), f"state/{name}", arrays, f"state {name!r}")
            for name, each in (self._model.state or {}).items()
        }
        self._check_large(arrays)
        self._warn_of_unequal(state, arrays)
        return {
            "state": state,
            "begun": self._initial_settings,
            "now": [settings_of(optimizer) for optimizer in self._optimizers.values()],
            "schedulers": self._schedulers.capture(),
            "trained": dict(trained_in(self.module).items() - self._initially_trained.items()),
        }

    def _check_large(self, arrays: Arrays) -> None:
        """Check that large arrays of `TorchModel.state`, of which rank 0's are saved, are equal.

        Raises:
            RanksDivergedError: one differs; on all ranks.
        """
        large = {name: a for name, a in arrays.items() if a.nbytes > SMALL}
        sums = {name: checksum(array) for name, array in large.items() if name.startswith("state/")}
        first = self._world.bcast(sums)
        differing = [
            name for name in sums.keys() | first.keys() if sums.get(name) != first.get(name)
        ]
        ranks = [rank for rank, differs in enumerate(self._world.allgather(differing)) if differs]
        if ranks:
            raise RanksDivergedError(
                f"large tensors of TorchModel(state=…) differ between rank 0 and rank {ranks[0]}, "
                "and checkpoints hold those of rank 0: let them follow from what all ranks share"
            )

    def _warn_of_unequal(self, state: Mapping[str, object], arrays: Arrays) -> None:
        """Warn once of objects of `TorchModel.state` that differ between ranks."""
        if not state or self._warned_of_unequal:
            return
        # Large arrays are equal: `_check_large` has compared them.
        small = {key: array for key, array in arrays.items() if array.nbytes <= SMALL}
        sums = {
            name: (
                repr(packed),
                [checksum(a) for key, a in small.items() if key.startswith(f"state/{name}")],
            )
            for name, packed in state.items()
        }
        others = self._world.allgather(sums)
        unequal = [repr(name) for name in sums if any(one[name] != sums[name] for one in others)]
        self._warned_of_unequal = bool(unequal)
        if unequal and self._world.Get_rank() == 0:
            notify(
                f"{', '.join(unequal)} of TorchModel(state=…) differ between ranks, and each keeps "
                "its own: let them follow from what all ranks share, if the training depends on "
                "them"
            )

    def _restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        for name, each in (self._model.state or {}).items():
            if name in state["state"]:
                each.load_state_dict(unpack_state(state["state"][name], arrays))
        every = self._optimizers.values()
        for optimizer, initial, now in zip(every, state["begun"], state["now"], strict=True):
            restore_settings(optimizer, initial, now)
        self._schedulers.restore(state["schedulers"])
        for name, trained in state["trained"].items():
            self.module.get_parameter(name).requires_grad_(trained)

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
        state = (self._model.state or {}).values()
        callbacks = filter(_keeps_state, self._callbacks)
        others = [*self._schedulers.objects, *callbacks, *self._results.objects]
        return [*self.optimizers, *others, *state, *held]

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


def _keeps_state(callback: TorchCallback) -> bool:
    return type(callback).state_dict is not TorchCallback.state_dict
