"""What a module of Lightning finds as its trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....errors import ModelError
from ...spec import TrainingSpec

if TYPE_CHECKING:
    from mpi4py import MPI


class StandIn:
    """The part of Lightning's Trainer that a module may ask; the rest is refused by name.

    Args:
        spec: the training.
        world: communicator of all ranks.
        backward: what ``manual_backward`` does with a loss.
    """

    def __init__(
        self, spec: TrainingSpec, world: MPI.Comm, backward: Callable[[Tensor], None]
    ) -> None:
        passes = -(-spec.train.rows // spec.global_batch)
        self.num_training_batches = spec.fit.steps_per_epoch or passes
        self.max_epochs = spec.fit.epochs
        self.max_steps = -1
        self.estimated_stepping_batches = self.num_training_batches * spec.fit.epochs
        self.accumulate_grad_batches = 1
        self.world_size = world.Get_size()
        self.global_rank = world.Get_rank()
        self.is_global_zero = self.global_rank == 0
        self.current_epoch = 0
        self.global_step = 0
        self.training, self.validating = True, False
        self.testing = self.predicting = self.sanity_checking = False
        self.fast_dev_run = self.barebones = False
        self.should_stop = False
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics: dict[str, Tensor] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.progress_bar_callback = None
        self.logger, self.loggers, self.callbacks = None, list[Any](), list[Any]()
        self.strategy = SimpleNamespace(
            _lightning_optimizers=[],
            backward=lambda loss, optimizer, *given, **named: backward(loss),
        )

    def tell(self, results: Mapping[str, Any]) -> None:
        """Let the module see results."""
        found = {n: torch.tensor(v) for n, v in results.items() if isinstance(v, float)}
        self.callback_metrics.update(found)
        self.logged_metrics.update(found)
        self.progress_bar_metrics.update({n: float(v) for n, v in found.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise ModelError(
            f"the module asks for trainer.{name}, but is trained without Lightning's Trainer; its "
            f"trainer has {', '.join(n for n in vars(self) if not n.startswith('_'))}"
        )
