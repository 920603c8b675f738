"""Batches of a dataset's rows for loops of PyTorch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from ...config.validators import check_count
from ...errors import InvalidInputError
from ...storage.arrays import Arrays

_EPOCH_BITS = 32
_ITERATIONS = 2**30


class _ReadBatches(Protocol):
    """Read the batches of one rank in one epoch, each ``every``-th from ``first_step`` on."""

    def __call__(
        self, epoch: int, rank: int, size: int, first_step: int, every: int
    ) -> Generator[Arrays, None, None]: ...


class TorchDataset(IterableDataset[dict[str, Any]]):
    """Batches of one rank, as tensors by column; see `Dataset.torch_dataset`.

    Args:
        read: reads the batches.
        steps: returns the steps of an epoch on a number of ranks.
        shard: rank and number of ranks; by default those of this process, when it reads.
    """

    def __init__(
        self, read: _ReadBatches, steps: Callable[[int], int], shard: tuple[int, int] | None
    ) -> None:
        self._read, self._steps, self._shard = read, steps, shard
        # Shared with the worker processes of a DataLoader: the number of the newest iteration with
        # its epoch, and the epoch with the step where the first iteration begins. One word each:
        # workers that begin an iteration at the same time write the same.
        self._shared = torch.zeros(2, dtype=torch.int64)
        self._share_memory()
        self._iterations = 0
        self._iteration = 0  # number of the newest iteration of this process
        self._position = (0, 0)
        self._loaded: tuple[int, int] | None = None  # position of this worker process alone

    def __len__(self) -> int:
        return self._steps(self._find_shard()[1])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Lightning asks for iterators that it never uses, torchdata for a state before the first
        # batch of a worker process.
        return self._batches(self._begin() if get_worker_info() else None)

    def _batches(self, begin: tuple[int, int] | None) -> Iterator[dict[str, Any]]:
        epoch, step = begin or self._begin()
        worker = get_worker_info()
        every = worker.num_workers if worker else 1
        rank, size = self._find_shard()
        last = self._steps(size)
        with contextlib.closing(self._read(epoch, rank, size, step, every)) as batches:
            for at, arrays in zip(range(step, last, every), batches, strict=False):
                self._position = epoch, at + every
                yield {name: _to_tensor(values) for name, values in arrays.items()}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a loaded position in that epoch is kept."""
        if self._shared[0] or epoch != self._first_position()[0]:
            self.load_state_dict({"epoch": epoch, "step": 0})

    def state_dict(self) -> dict[str, int]:
        """Return the position behind the batches of this process so far.

        Raises:
            InvalidInputError: worker processes of a DataLoader read the batches.
        """
        newest, epoch = divmod(int(self._shared[0]), 1 << _EPOCH_BITS)
        if not newest:
            epoch, step = self._first_position()
        elif newest == self._iteration:
            epoch, step = self._position
        else:
            raise InvalidInputError(
                "worker processes of a DataLoader read these batches, some ahead: use torchdata's "
                f"StatefulDataLoader, or count the steps: {{'epoch': {epoch}, 'step': …}}"
            )
        return {"epoch": epoch, "step": step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration at a position: an epoch, and a step in it.

        Args:
            state: that of `state_dict`.
        """
        epoch, step = (check_count(key, state[key], minimum=0) for key in ("epoch", "step"))
        if get_worker_info() is not None:
            self._loaded = epoch, step
            return
        if step >= len(self):
            epoch, step = epoch + 1, 0
        self._shared[:] = torch.tensor([0, epoch << _EPOCH_BITS | step])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share_memory()

    def _share_memory(self) -> None:
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    def _first_position(self) -> tuple[int, int]:
        return divmod(int(self._shared[1]), 1 << _EPOCH_BITS)

    def _begin(self) -> tuple[int, int]:
        """Begin an iteration; return its epoch and the first step of this process."""
        worker = get_worker_info()
        number = worker.id if worker else 0
        self._iterations += 1
        # Equal in all worker processes of one iteration of a DataLoader.
        seed = worker.seed - number if worker else 0
        self._iteration = (seed + self._iterations) % _ITERATIONS + 1
        newest, epoch = divmod(int(self._shared[0]), 1 << _EPOCH_BITS)
        first, step = self._first_position()
        if not newest:
            epoch = first
        elif newest != self._iteration:
            epoch += 1
        self._position = epoch, (step if epoch == first else 0) + number
        if self._loaded is not None:
            self._position, self._loaded = self._loaded, None
        self._shared[0] = self._iteration << _EPOCH_BITS | self._position[0]
        return self._position

    def _find_shard(self) -> tuple[int, int]:
        if self._shard is not None:
            return self._shard
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _to_tensor(values: np.ndarray) -> Any:
    """Return a tensor that shares the memory of an array; text as a list."""
    return values.tolist() if values.dtype == object else torch.from_numpy(values)
