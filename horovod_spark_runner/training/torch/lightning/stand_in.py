"""What a module of Lightning finds as its trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....errors import ModelError
from ...spec import TrainingSpec

if TYPE_CHECKING:
    from mpi4py import MPI


class _Refusing:
    """Says so where it is asked for anything that it has not."""

    _called: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise ModelError(
            f"the module asks for {self._called}.{name}, but is trained without Lightning's "
            f"Trainer; its {self._called} has "
            f"{', '.join(n for n in vars(self) if not n.startswith('_'))}"
        )


class _Strategy(_Refusing):
    """What ``manual_backward`` and ``optimizers`` ask."""

    _called = "trainer.strategy"

    def __init__(self, backward: Callable[..., None]) -> None:
        self._lightning_optimizers: list[Any] = []
        # Lightning gives the optimizer, too, which is None in manual optimization.
        self.backward = lambda loss, optimizer, *given, **named: backward(loss, *given, **named)


class StandIn(_Refusing):
    """The part of Lightning's Trainer that a module may ask; the rest is refused by name.

    Args:
        spec: the training.
        world: communicator of all ranks.
        backward: what ``manual_backward`` does with a loss and what is given with it.
    """

    _called = "trainer"

    def __init__(self, spec: TrainingSpec, world: MPI.Comm, backward: Callable[..., None]) -> None:
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
        self.strategy = _Strategy(backward)

    def tell(self, results: Mapping[str, Any]) -> None:
        """Let the module see results."""
        found = {n: torch.tensor(v) for n, v in results.items() if isinstance(v, float)}
        self.callback_metrics.update(found)
        self.logged_metrics.update(found)
        self.progress_bar_metrics.update({n: float(v) for n, v in found.items()})
