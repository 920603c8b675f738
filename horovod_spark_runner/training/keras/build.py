"""A model on a rank, from the spec to variables that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from mpi4py import MPI

from ...errors import ModelError
from ...settings.sync import Allreduce, AsyncServer, DiLoCo, LocalSGD, Sync
from ..spec import TrainingSpec
from ..sync.synchroniser import Alike, Synchroniser
from .batches import BatchBinding
from .exchange import GradientExchange
from .model import (
    build_and_watch,
    check_losses,
    check_trainable,
    has_own_steps,
    switch_off_jit,
)
from .optimizers import (
    check_compression,
    check_optimizers,
    find_optimizers,
    leaf_optimizers,
)
from .step import Steps, makes_only_variables
from .tensors import as_tensor
from .untracked import check_tracked

# Constraints that a mean of weights holds if each of them does.
_CONVEX = (keras.constraints.NonNeg, keras.constraints.MaxNorm)
# What becomes of ranks' weights where they meet, by the settings' class.
_MET: dict[type, str] = {
    LocalSGD: "the mean that sync=LocalSGD(…) takes of them",
    DiLoCo: "the outer step of sync=DiLoCo(…)",
    AsyncServer: "the sum of what ranks add to it with sync=AsyncServer(…)",
}


class BuiltModel:
    """A model, its optimizers and its steps, all variables made.

    ``Model.fit`` makes what a model does not have yet when it traces its first step. So does this,
    with no rows: weights of subclassed models, optimizers, metrics and the names of outputs are
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
        self.model, asked_for_jit = build_and_watch(spec.model)
        parts = [spec.train] if spec.validation is None else [spec.train, spec.validation]
        rows = [part.rows for part in parts]
        check_trainable(self.model, spec.fit.batch_size, rows, world.Get_size())
        check_optimizers(find_optimizers(self.model))
        switch_off_jit(self.model, asked_for_jit)
        if world.Get_rank():
            # Ops without a seed of their own must not draw the same numbers on all ranks; what they
            # draw for weights is replaced by rank 0's.
            tf.random.set_seed(spec.fit.seed + world.Get_rank())
        self.batches = BatchBinding(self.model, spec)
        example = tf.nest.map_structure(as_tensor, self.batches.example)
        self.batches.bind_labels(self.batches.outputs_of(example))
        self.exchange = GradientExchange(self.model, synchroniser, share_logs=share_logs)
        eager = bool(self.model.run_eagerly)
        blank = self.batches.blank
        data, test_data = self.batches.training_data(blank), self.batches.data(blank)
        own = has_own_steps(self.model)
        once = makes_only_variables(self.model)
        self.steps = Steps(self.exchange, data, test_data, eager=eager, own=own, once=once)
        optimizer = self.model.optimizer
        if eager and optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self.optimizers = find_optimizers(self.model, self.exchange.known)
        check_optimizers(self.optimizers)
        if self.steps.graph is not None:
            check_tracked(self.model, self.optimizers, self.steps.graph)
        if isinstance(spec.sync, Allreduce):
            check_compression(self.optimizers, spec.sync.compression)
        if world.Get_size() > 1:
            check_losses(self.model)
            check_between_meetings(self.model, self.optimizers, synchroniser, spec.sync)
        elif isinstance(spec.sync, DiLoCo):
            _check_constraints(self.model, spec.sync)


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
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if getattr(layer, "synchronized", False):
            raise ModelError(
                f"layer {layer.name!r} has synchronized=True: its statistics are those of all "
                "ranks' rows in every step, in which ranks do not meet with LocalSGD, DiLoCo and "
                "AsyncServer. Leave it out (the moments are averaged where ranks meet), or use "
                "sync=Allreduce()"
            )
    scaling = [o for o in optimizers if isinstance(o, keras.optimizers.LossScaleOptimizer)]
    if scaling and sync.alike is Alike.EVERYTHING:
        raise ModelError(
            f"optimizer {scaling[0].name!r} scales the loss by a factor that each rank finds for "
            "itself, and leaves out steps in which its gradients are not finite: ranks would count "
            "other steps, which have no mean. Use sync=LocalSGD(…) without average_optimizer, or "
            "train in float32 or mixed_bfloat16, which need no loss scaling"
        )
    for optimizer in leaf_optimizers(optimizers):
        if optimizer.use_ema and sync.alike is Alike.WEIGHTS:
            raise ModelError(
                f"optimizer {optimizer.name!r} has use_ema=True: each rank would keep moving "
                "averages of its own. Use sync=LocalSGD(average_optimizer=True), which averages "
                "them, too, or sync=Allreduce()"
            )
    _check_constraints(model, options)
    if not sync.in_step and model.steps_per_execution > 1:
        raise ModelError(
            f"steps_per_execution={model.steps_per_execution}: with sync=AsyncServer(…) each step "
            "begins with weights of its own, and a rank's steps are not counted in such groups. "
            "Compile the model with steps_per_execution=1, or use sync=Allreduce()"
        )


def _check_constraints(model: keras.Model, options: Sync) -> None:
    """Check that weights hold their constraints where ranks have met.

    Raises:
        ModelError: they do not.
    """
    given = {w.path: getattr(w, "constraint", None) for w in model.trainable_weights}
    kept = _CONVEX if isinstance(options, LocalSGD) else ()
    bound = [path for path, one in given.items() if one is not None and type(one) not in kept]
    if bound:
        raise ModelError(
            f"weight {bound[0]!r} has a constraint, {type(given[bound[0]]).__name__}, which holds "
            f"for what each rank makes of it but not for {_MET[type(options)]}. Leave the "
            "constraint out, or use sync=Allreduce()"
        )
