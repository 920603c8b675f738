"""A model on a rank, from the spec to variables that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf
from mpi4py import MPI

from ...config.sync import Allreduce, DiLoCo, Sync
from ...errors import ModelError
from ...sync.synchroniser import SyncedState, Synchroniser
from ...training.spec import TrainingSpec
from .binding import BatchBinding, as_tensor
from .model import build_model, check_losses, check_trainable, has_custom_steps
from .optimizers import (
    check_compression,
    check_optimizers,
    find_optimizers,
    leaf_optimizers,
)
from .state import check_tracked
from .step import GradientExchange, Steps, makes_only_variables


class BuiltModel:
    """A model, its optimizers and its steps, all variables made.

    ``Model.fit`` makes what a model does not have yet when it traces its first step. So does this,
    with one row: weights of subclassed models, optimizers, metrics and the names of outputs are
    known before a checkpoint is restored or anything is sent.

    Args:
        spec: the training.
        world: communicator of all ranks.
        synchroniser: what becomes of gradients.
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
        self.batches.bind_labels(self.batches.outputs_of(example))
        self.exchange = GradientExchange(self.model, synchroniser, share_logs=share_logs)
        eager = bool(self.model.run_eagerly)
        data, test_data = self.batches.training_data(filler), self.batches.data(filler)
        custom = has_custom_steps(self.model)
        once = makes_only_variables(self.model)
        self.steps = Steps(self.exchange, data, test_data, eager=eager, custom=custom, once=once)
        optimizer = self.model.optimizer
        if eager and optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
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
            check_between_meetings(self.model, self.optimizers, synchroniser, spec.config.sync)


def check_between_meetings(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    sync: Synchroniser,
    options: Sync,
) -> None:
    """Check that a model can be trained by ranks that do not meet in every step.

    Args:
        model: the model.
        optimizers: its optimizers.
        sync: the way of synchronising.
        options: its settings.

    Raises:
        ModelError: it has a layer, weight or optimizer that would not do what it says.
    """
    if sync.meets_in_every_step:
        return
    for what in _of_every_step(model, optimizers, sync):
        raise ModelError(
            f"{what} does not go with sync={type(options).__name__}(…), by which ranks do not meet "
            "in every step; leave it out, or use sync=Allreduce()"
        )


def _of_every_step(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer], sync: Synchroniser
) -> Iterator[str]:
    """Yield the parts of a model that must be equal on all ranks in every step."""
    for layer in model._flatten_layers(include_self=False, recursive=True):
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
