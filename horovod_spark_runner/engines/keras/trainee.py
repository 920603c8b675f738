"""A Keras model as the training loop knows it."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from mpi4py import MPI

from ...checkpoint.config_diff import ModelChanges
from ...checkpoint.model_state import Variable
from ...checkpoint.run_directory import RunDirectory
from ...config.prediction import added_columns
from ...config.sync import Allreduce, DiLoCo, Sync
from ...errors import ModelError
from ...storage.arrays import Arrays
from ...sync.synchroniser import SyncedState, Synchroniser
from ...training.epochs import Step
from ...training.label_values import explain_index
from ...training.progress import Logs
from ...training.spec import OutputSpec, TrainingSpec, WarmStart
from ...training.traces import Timeline
from ...training.trained_model import ModelInputs
from ...training.trainee import Trainee
from .artifact import outputs_of, save_model
from .binding import BatchBinding, as_tensor
from .callbacks import Callbacks, check_callbacks, overrides
from .export import SavedModelBuilder, make_builder
from .loading import load_initial_weights
from .metrics import epoch_logs, merge_of, metric_variables
from .model import (
    Nest,
    all_layers,
    build_model,
    check_losses,
    check_trainable,
    finalize_layers,
    has_custom_steps,
    sample_inputs,
)
from .optimizers import (
    LearningRates,
    check_compression,
    check_optimizers,
    find_optimizers,
    leaf_optimizers,
    rate_of_last_step,
)
from .probe import try_model
from .saved import SavedModel
from .state import (
    KerasVariables,
    check_tracked,
    compare_models,
    describe_model,
    generators,
    nothing_drawn,
    separate_generators,
)
from .step import DistributedStep, Steps

# Optimizers that only create variables of constants when they are built. What another assigns to
# them (`ScheduleFreeAdamW` the weights) is not done in a step that Keras compiles.
_PLAIN = (
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Lamb,
    keras.optimizers.Lion,
    keras.optimizers.RMSprop,
    keras.optimizers.SGD,
)


class KerasTrainee(Trainee):
    """Keras implementation of `Trainee`.

    Args:
        spec: the training.
        world: communicator of all ranks.
        synchroniser: reduces gradients.

    Raises:
        ModelError: the model cannot be trained here, or not on these columns.
        InvalidInputError: something given is not a Keras callback.
    """

    def __init__(self, spec: TrainingSpec, world: MPI.Comm, synchroniser: Synchroniser) -> None:
        self._spec = spec
        self._rank = world.Get_rank()
        self._callbacks = check_callbacks(spec.config.callbacks)
        watched = ("on_train_batch_end", "on_batch_end", "on_test_batch_end")
        share_logs = overrides(self._callbacks, *watched)
        self._built = _BuiltModel(spec, world, synchroniser, share_logs=share_logs)
        self.model = self._built.model
        self._batches, self._steps = self._built.batches, self._built.steps
        self._exchange = self._built.exchange
        self.columns = self._batches.columns
        self.variables = KerasVariables(self.model, self._built.optimizers)
        generators()  # now, and not when a checkpoint is taken
        if self._rank == 0 and spec.config.checkpoints.saved_model:
            self._builder().trace()  # fails early if it cannot be exported

    def train_step(
        self, step: Step, requests: Sequence[bool], last: bool
    ) -> tuple[Logs | None, list[float] | None]:
        if self._exchange.size == 1 and not step.batch.rows:  # a step that nobody waits for
            return self.model.get_metrics_result(), None
        # Fewer rows than ranks: take part in the exchange with a row that counts for nothing.
        arrays = step.batch.arrays if step.batch.rows else self._batches.filler
        data = self._batches.training_data(arrays)
        self._exchange.want_logs(last)
        with self._explaining_indices(arrays):
            if step.equal:
                logs, counts = self._steps.train_full(data, requests)
            else:
                logs, counts = self._steps.train(data, step.fraction, requests)
        return logs, None if counts is None else counts.numpy().tolist()

    def test_step(self, step: Step, last: bool) -> Logs | None:
        arrays = step.batch.arrays if step.batch.rows else self._batches.filler
        self._exchange.want_logs(last)
        with self._explaining_indices(arrays):
            return self._steps.test(self._batches.data(arrays), step.fraction)

    @contextlib.contextmanager
    def _explaining_indices(self, arrays: Arrays) -> Iterator[None]:
        """Name the columns of integers where a step looks up what is not there."""
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            lookup = re.search(r"\S+ = -?\d+ is not in \[0, \d+\)", error.message)
            if lookup is None:
                raise
            inputs = {name: arrays[name] for name in self._spec.inputs.columns}
            raise explain_index(lookup[0], inputs) from error

    def reset_metrics(self) -> None:
        self.model.reset_metrics()

    def results(self, kind: str, logs: Logs | None, fraction: float) -> dict[str, object]:
        return epoch_logs(self.model, logs, self._exchange.logged.get(kind, set()), fraction)

    def describe(self) -> dict[str, Any]:
        return describe_model(self.model)

    def compare(
        self, then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool
    ) -> ModelChanges:
        return compare_models(then, now, in_epoch=in_epoch)

    def save(self, directory: RunDirectory) -> SavedModel:
        # An earlier one, of other weights, must not be there beside this model.
        directory.saved_model.delete_folder()
        inputs = ModelInputs.of_training(self._spec)
        saved = save_model(directory, self.model, inputs, self._batches.inputs)
        if self._spec.config.checkpoints.saved_model:
            self._builder().write(directory.saved_model)
        return saved

    def outputs(self) -> Sequence[OutputSpec] | None:
        with nothing_drawn():
            inputs = ModelInputs.of_training(self._spec)
            return outputs_of(self.model, inputs, self._batches.inputs)[0]

    def _builder(self) -> SavedModelBuilder:
        name = partial(added_columns, prediction_col=self._spec.config.prediction_col)
        inputs = sample_inputs(self.model, self._batches.inputs, self._batches.sample)
        return make_builder(self._spec, self.model, inputs, name)

    @property
    def has_complete_logs(self) -> bool:
        # A test_step may log what train_step does not; callbacks may add to an epoch's results.
        adding = [c for c in self._callbacks if _is_the_users(c)]
        return not has_custom_steps(self.model) and not overrides(adding, "on_epoch_end")

    @property
    def steps_per_execution(self) -> int:
        steps: int = self.model.steps_per_execution
        return steps

    def hooks(self, *, steps: int, resumed: bool) -> Callbacks:
        params = {"verbose": 2 if self._rank == 0 else 0, "epochs": self._spec.fit.epochs}
        return Callbacks(
            self._callbacks,
            self.model,
            self._rank,
            {**params, "steps": steps},
            resumed=resumed,
            retrace=self._steps.trace,
        )

    def rates(self, scaling: str) -> LearningRates:
        return LearningRates(self._built.optimizers, scaling)

    def exchange_seconds(self) -> float | None:
        return self._exchange.stopwatch.seconds

    def tracer(self) -> _KerasTracer:
        return _KerasTracer()

    def learning_rates(self) -> dict[str, float]:
        optimizers = leaf_optimizers(self._built.optimizers)
        rates = [rate_of_last_step(optimizer) for optimizer in optimizers]
        if len(rates) == 1:
            return {"learning_rate": rates[0]}
        return {f"learning_rate/{number}": rate for number, rate in enumerate(rates)}

    def load_initial_weights(self, start: WarmStart) -> None:
        load_initial_weights(self.model, start)

    def variables_were_set(self) -> None:
        if finalize_layers(self.model):
            self._steps.trace()

    def separate_random_streams(self, rank: int) -> None:
        separate_generators(rank)

    def generators(self) -> dict[str, Variable]:
        return generators()

    def metric_variables(self) -> list[keras.Variable]:
        return metric_variables(self.model)

    def metric_merges(self) -> list[str]:
        return [merge_of(variable) for variable in self.metric_variables()]

    def metric_names(self) -> list[str]:
        return [metric.name for metric in self.model.metrics]

    def make_metrics(self) -> None:
        if self.model.run_eagerly:  # Keras makes the compiled metrics at their first use
            self.model.test_step(self._batches.data(self._batches.filler))
            self.model.reset_metrics()

    def probe(self, step: Step) -> Sequence[str]:
        if step.batch.rows < 2:
            return ()
        arrays = step.batch.arrays
        training_data, data = self._batches.training_data(arrays), self._batches.data(arrays)
        return try_model(self.model, self._exchange, training_data, data)

    def finish(self) -> None:
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.finalize_variable_values(self.model.trainable_weights)


def _is_the_users(callback: keras.callbacks.Callback) -> bool:
    calls = isinstance(callback, keras.callbacks.LambdaCallback)
    return calls or not type(callback).__module__.startswith("keras.")


class _BuiltModel:
    """A model, its optimizers and its steps, all variables made.

    ``Model.fit`` makes what a model does not have yet when it traces its first step. So does this,
    with one row: weights of subclassed models, optimizers, metrics and the names of outputs are
    known before a checkpoint is restored or anything is sent.

    Args:
        spec: the training.
        world: communicator of all ranks.
        synchroniser: reduces gradients.
        share_logs: whether the steps' logs are to be those of all ranks.

    Raises:
        ModelError: the model cannot be trained here, or not on these columns.
    """

    def __init__(
        self, spec: TrainingSpec, world: MPI.Comm, synchroniser: Synchroniser, *, share_logs: bool
    ) -> None:
        self.model = build_model(spec.model)
        parts = [spec.train] if spec.validation is None else [spec.train, spec.validation]
        rows = [part.rows for part in parts]
        check_trainable(self.model, spec.fit.batch_size, rows, world.Get_size())
        check_optimizers(find_optimizers(self.model))
        # No collective can run inside what XLA compiles, as Keras has it do by itself on a GPU.
        self.model.jit_compile = False
        if world.Get_rank():
            # Ops without a seed of their own must not draw the same numbers on all ranks; what they
            # draw for weights is replaced by rank 0's.
            tf.random.set_seed(spec.fit.seed + world.Get_rank())
        self.batches = BatchBinding(self.model, spec)
        filler = self.batches.filler
        example = tf.nest.map_structure(as_tensor, self.batches.inputs(filler))
        outputs = self.batches.outputs_of(example)
        self.batches.bind_labels(outputs)
        self.exchange = DistributedStep(self.model, synchroniser, share_logs=share_logs)
        eager = bool(self.model.run_eagerly)
        data, test_data = self.batches.training_data(filler), self.batches.data(filler)
        custom = has_custom_steps(self.model)
        optimizer = self.model.optimizer
        plain = not custom and type(optimizer) in _PLAIN
        if optimizer is not None and not optimizer.built and (eager or plain):
            optimizer.build(self.model.trainable_variables)
        if not (eager or custom):
            _build_compiled(self.model, data, outputs)
        self.steps = Steps(self.exchange, data, test_data, eager=eager, custom=custom)
        self.optimizers = find_optimizers(self.model, self.exchange.optimizers)
        check_optimizers(self.optimizers)
        if self.steps.graph is not None:
            check_tracked(self.model, self.optimizers, self.steps.graph)
        if isinstance(spec.config.sync, Allreduce):
            check_compression(self.optimizers, spec.config.sync.compression)
        if world.Get_size() > 1:
            check_losses(self.model)
        # DiLoCo makes an outer step on one rank, too.
        if world.Get_size() > 1 or isinstance(spec.config.sync, DiLoCo):
            _check_between_meetings(self.model, self.optimizers, synchroniser, spec.config.sync)


def _build_compiled(model: keras.Model, data: Nest, outputs: Nest | None) -> None:
    """Make the metrics and losses that a model is compiled with.

    TensorFlow traces a step that makes variables twice, which takes as long again.

    Args:
        model: the model.
        data: a row, as ``train_step`` takes it.
        outputs: what the model's call gives.
    """
    _, labels, _ = keras.utils.unpack_x_y_sample_weight(data)
    if labels is None or outputs is None:
        return
    try:
        keras.tree.assert_same_structure(outputs, labels)
    except (TypeError, ValueError):  # Keras arranges them in the step, or refuses them there
        return
    labels = tf.nest.map_structure(lambda y: tf.TensorSpec((None, *y.shape[1:]), y.dtype), labels)
    for compiled in (model._compile_metrics, model._compile_loss):
        if compiled is not None and not compiled.built:
            compiled.build(labels, outputs)


def _check_between_meetings(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    sync: Synchroniser,
    options: Sync,
) -> None:
    """Check that a model can be trained by ranks that do not meet in every step.

    Args:
        model: the model.
        optimizers: its optimizers.
        sync: the synchroniser.
        options: its settings.

    Raises:
        ModelError: it has a layer, weight or optimizer that would not do what it says.
    """
    if sync.meets_in_every_step:
        return
    for what in _of_every_step(model, optimizers, sync):
        raise ModelError(
            f"{what} is not supported with sync={type(options).__name__}(…), which does not "
            "synchronize every step; leave it out, or use sync=Allreduce()"
        )


def _of_every_step(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer], sync: Synchroniser
) -> Iterator[str]:
    """Yield the parts of a model that must be equal on all ranks in every step."""
    for layer in all_layers(model)[1:]:
        if getattr(layer, "synchronized", False):
            yield f"layer {layer.name!r} with synchronized=True"
    for optimizer in optimizers:
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if scales and sync.synced_state is SyncedState.EVERYTHING:
            yield f"average_optimizer=True for {optimizer.name!r}, whose loss scale is its rank's,"
    for optimizer in leaf_optimizers(optimizers):
        if optimizer.use_ema and sync.synced_state is SyncedState.WEIGHTS:
            yield (
                f"optimizer {optimizer.name!r} with use_ema=True, for which there is "
                "LocalSGD(average_optimizer=True),"
            )
    for weight in model.trainable_weights:
        if getattr(weight, "constraint", None) is not None:
            yield f"weight {weight.path!r} with the constraint {type(weight.constraint).__name__}"
    if not sync.in_step and model.steps_per_execution > 1:
        yield f"steps_per_execution={model.steps_per_execution}"


class _KerasTracer(Timeline):
    """Horovod's timeline, and TensorFlow's profiler; see `Tracer`."""

    start_timeline, stop_timeline = Timeline.start, Timeline.stop

    def __init__(self) -> None:
        super().__init__(hvd)
        self._place = ""

    def start_profile(self) -> None:
        self._place = tempfile.mkdtemp(prefix="tf-profile-")
        tf.profiler.experimental.start(self._place)

    def stop_profile(self, folder: Path, name: str) -> None:
        try:
            tf.profiler.experimental.stop()
            # TensorFlow names it after the time.
            (made,) = Path(self._place, "plugins", "profile").iterdir()
            target = folder / "plugins" / "profile" / name
            target.parent.mkdir(parents=True)
            shutil.move(made, target)
        finally:
            shutil.rmtree(self._place, ignore_errors=True)
