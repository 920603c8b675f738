"""Sums of tensors over the ranks, by Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor

from ...sync.synchroniser import Compression, Traffic

# Types that MPI has no sum for; they are added up as float32.
_NARROW = (torch.bfloat16,)


class Part:
    """This rank's part of the rows of a global batch; see `Share`.

    Args:
        size: number of ranks.
        fraction: its rows over those of the global batch; ``None`` where all ranks have equally
            many.
    """

    def __init__(self, size: int, fraction: float | None = None) -> None:
        self._size = size
        self._fraction = fraction

    @property
    def fraction(self) -> float:
        """This rank's part of the rows."""
        return 1.0 / self._size if self._fraction is None else self._fraction

    def term(self, tensor: Tensor) -> Tensor:
        """Return this rank's term of a mean over the rows of all ranks (`total` ends it)."""
        if self._fraction is None:
            return tensor
        # 0 times NaN is 0 here: a rank without rows has no say.
        return tensor * self._fraction if self._fraction else torch.zeros_like(tensor)

    def total(self, summed: Tensor) -> Tensor:
        """Return the mean, given the sum of all ranks' terms."""
        if self._fraction is None and self._size > 1:
            return summed / self._size
        return summed


class TensorCollectives:
    """Sums of tensors, as `horovod_spark_runner.sync` needs them."""

    def __init__(self) -> None:
        self._sent = self._whole = 0.0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(hvd.size())

    def sum(self, tensors: Sequence[Tensor | np.ndarray], name: str) -> list[Tensor]:
        """Return each tensor's sum over all ranks; every rank must call it with the same shapes.

        All tensors of one type go in one message.

        Args:
            tensors: dense tensors, or arrays.
            name: the same on all ranks, and different for every call within one step.
        """
        detached = [torch.as_tensor(tensor).detach() for tensor in tensors]
        if hvd.size() == 1:
            return [tensor.clone() for tensor in detached]
        groups: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(detached):
            dtype = _summed_as(tensor)
            groups.setdefault(dtype, []).append(index)
        result: list[Tensor] = list(detached)
        for dtype, indices in groups.items():
            parts = [detached[index] for index in indices]
            flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
            label = f"{name}.{str(dtype).removeprefix('torch.')}"
            flat = hvd.synchronize(hvd.allreduce_async_(flat, name=label, op=hvd.Sum))
            pieces = flat.split([part.numel() for part in parts])
            for index, part, piece in zip(indices, parts, pieces, strict=True):
                result[index] = piece.view(part.shape).to(part.dtype)
        return result

    def compression(self, name: str) -> Compression:
        """Return Horovod's own compression of that name."""
        algorithm: Compression = getattr(hvd.Compression, name)
        return algorithm

    def on_host(
        self,
        function: Callable[[Sequence[np.ndarray]], list[np.ndarray]],
        tensors: Sequence[Tensor],
    ) -> list[Tensor]:
        """Apply a function of arrays to tensors, on the host."""
        wide = [t.detach().float() if t.element_size() < 4 else t.detach() for t in tensors]
        made = function([tensor.cpu().numpy() for tensor in wide])
        return [
            torch.from_numpy(array).to(tensor.device, tensor.dtype)
            for array, tensor in zip(made, tensors, strict=True)
        ]

    def nbytes(self, tensors: Sequence[Tensor]) -> int:
        """Return how many bytes of tensors are added up."""
        return sum(tensor.numel() * _summed_as(tensor).itemsize for tensor in tensors)

    def count(self, sent: float, whole: float) -> None:
        """Count sent bytes."""
        self._sent += sent
        self._whole += whole

    def counted(self) -> Traffic:
        """Return the counted bytes, summed over all steps so far."""
        return Traffic(self._sent, self._whole)


def _summed_as(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in _NARROW else tensor.dtype
