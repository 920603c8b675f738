"""Gradients on their way from the backward pass to the optimizers, by the synchroniser.

In the usual step they leave in buckets while the backward pass goes on: a thread hands each bucket
to the synchroniser once its gradients, and all buckets before it, are there. One is on its way at
a time, so that sums are made in the same order whenever a step is repeated. In a step of the user's
own, an optimizer's gradients leave where it is about to step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import ModelError
from ...sync import allreduce
from ...sync.synchroniser import Compression, Synchroniser, Traffic
from .model import dtype_name
from .optimizers import parameters_of

_Sent = tuple[list[Tensor | None], list[Tensor]]
# Types that MPI has no sum for; they are added up as float32.
_NARROW = (torch.bfloat16,)


class GradientExchange:
    """Exchange of the gradients of the global batch, for optimizers.

    Args:
        optimizers: those of the training.
        synchroniser: what becomes of gradients.
        size: number of ranks.
        device: where gradients are.

    Attributes:
        size: the ranks that make a step together.
        delays_gradients: whether an update may contain parts of earlier steps' gradients.
        counts: ranks that made each request of this step; ``None`` where steps do not meet.
        total_count: the sum over all ranks of this step's `count`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        synchroniser: Synchroniser,
        size: int,
        device: torch.device,
    ) -> None:
        self._synchroniser = synchroniser
        # Between meetings, a rank's step is that of a process of its own.
        self._together = synchroniser.meets_in_every_step
        self.size = size if self._together else 1
        self.delays_gradients = synchroniser.delays_gradients
        self.counts: list[float] | None = None
        self.total_count = 0.0
        self._device = device
        self._part = _Part(self.size)
        self._requests: Sequence[bool] = ()
        self._divisor = 0.0
        self._calls = [0] * len(optimizers)
        self._optimizers = optimizers
        self._parameters = [parameters_of(optimizer) for optimizer in optimizers]
        # Those that may be trained later have buckets of their own, which are sent from then on.
        first = self._parameters[0]
        self._buckets = [
            *_buckets_of([p for p in first if p.requires_grad]),
            *_buckets_of([p for p in first if not p.requires_grad and p.is_floating_point()]),
        ]
        self._bucket_of = {id(p): n for n, bucket in enumerate(self._buckets) for p in bucket}
        # What has ever required a gradient, and the buckets with some of it, in their order.
        self._trained: set[int] = set()
        self._active: list[int] = []
        self._overlapping = False
        self._names: dict[int, str] = {}
        # In a backward pass: gradients that a bucket lacks, those that came, buckets that left.
        self._missing = [0] * len(self._buckets)
        self._came: set[int] = set()
        self._sent: list[Future[_Sent]] = []
        self._watching = False
        # A parameter whose gradient came twice in a backward pass.
        self._twice: str | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._seconds = 0.0

    @property
    def seconds(self) -> float | None:
        """The seconds in which all steps so far had nothing to do but to wait for sums.

        An exchange during the backward pass does not count. ``None`` on a GPU, which
        computes while this process waits.
        """
        if self.size == 1:
            return 0.0
        return self._seconds if self._device.type == "cpu" else None

    @property
    def fraction(self) -> float:
        """This rank's part of the rows of the step."""
        return self._part.fraction

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the time of waiting for other ranks within a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def overlap(self, module: nn.Module) -> None:
        """Enable sending gradients during the backward pass, where there are several buckets.

        Args:
            module: what is trained.
        """
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._overlapping = self.size > 1

    @contextlib.contextmanager
    def step(self, fraction: float | None, requests: Sequence[bool]) -> Iterator[None]:
        """Begin and end a step, with this rank's requests to all ranks.

        Args:
            fraction: its part of the rows; ``None`` where all ranks have equally many.
            requests: what it asks for.
        """
        self._part = _Part(self.size, fraction if self._together else None)
        self._requests, self.counts = requests, None
        self._calls = [0] * len(self._optimizers)
        self._divisor = self.total_count = 0.0
        yield
        if self.counts is None and self._together:
            with self.waiting():
                self._note(TensorCollectives().sum([self._control()], "control")[0])

    def count(self, divisor: float) -> None:
        """Set the divisor of this rank's loss, before the backward pass.

        The sum of all ranks' goes along with the gradients: see `total_count`.
        """
        self._divisor = divisor

    # -- the usual step ------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Wrap the backward pass, whose gradients may be sent before it has ended.

        Raises:
            ModelError: a gradient came in parts, or an optimizer has been given other parameters
                than it had.
        """
        self._take_up()
        self._missing = [sum(p.requires_grad for p in bucket) for bucket in self._buckets]
        self._came, self._sent = set(), []
        self._watching = self._thread is not None
        try:
            yield
        finally:
            self._watching = False
        if self._twice is not None:
            raise ModelError(
                f"the gradient of {self._twice!r} came in parts, but gradients leave for the other "
                "ranks as soon as they come. That is how torch.utils.checkpoint(…, "
                "use_reentrant=True) computes gradients of what is used in several parts; give "
                "use_reentrant=False"
            )

    def exchange(self) -> None:
        """Replace all parameters' gradients by the global batch's, after the backward pass."""
        with self.waiting():
            while self._thread is not None and len(self._sent) < len(self._active):
                self._submit()
            for place, number in enumerate(self._active):
                sent = self._send(number) if self._thread is None else self._sent[place].result()
                self._assign(self._buckets[number], *sent)

    def _arrived(self, parameter: nn.Parameter) -> None:
        if not self._watching:
            return
        key = id(parameter)
        if key in self._came:
            self._twice = self._names[key]
            return
        self._came.add(key)
        self._missing[self._bucket_of[key]] -= 1
        for number in self._active[len(self._sent) :]:
            if self._missing[number]:
                break
            self._submit()

    def _submit(self) -> None:
        assert self._thread is not None
        self._sent.append(self._thread.submit(self._send, self._active[len(self._sent)]))

    def _send(self, number: int) -> _Sent:
        last = number == self._active[-1]
        return self._reduce(self._buckets[number], str(number), ask=last)

    # -- a step of the user's own --------------------------------------------------------------

    def of(self, optimizer: Optimizer) -> None:
        """Replace the gradients that an optimizer is about to apply by the global batch's.

        Raises:
            ModelError: an optimizer has been given other parameters than it had.
        """
        self._take_up()
        parameters = [p for p in parameters_of(optimizer) if id(p) in self._trained]
        number = next(n for n, each in enumerate(self._optimizers) if each is optimizer)
        # Which optimizer, for which time in a step.
        place = f"{number}.{self._calls[number]}"
        self._calls[number] += 1
        with self.waiting():
            self._assign(parameters, *self._reduce(parameters, place, ask=self.counts is None))

    # -- both ----------------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Register parameters that now require gradients, the same on all ranks.

        Raises:
            ModelError: an optimizer has been given other parameters.
        """
        for optimizer, parameters in zip(self._optimizers, self._parameters, strict=True):
            now = parameters_of(optimizer)
            if len(now) != len(parameters) or any(
                p is not q for p, q in zip(now, parameters, strict=True)
            ):
                raise ModelError(
                    f"optimizer {type(optimizer).__name__} has {len(now)} parameters now, and had "
                    f"{len(parameters)}, or others, when the training began: their gradients would "
                    "not be exchanged. Give it all parameters in the beginning; those that do not "
                    "require gradients are left alone until requires_grad_(True)"
                )
        new = [
            p
            for parameters in self._parameters
            for p in parameters
            if p.requires_grad and id(p) not in self._trained
        ]
        if not new:
            return
        self._trained |= {id(parameter) for parameter in new}
        self._active = [
            number
            for number, bucket in enumerate(self._buckets)
            if any(id(parameter) in self._trained for parameter in bucket)
        ]
        if not self._overlapping:
            return
        for parameter in new:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._arrived
            )
        if self._thread is None and len(self._active) > 1:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradients")

    def changes(self, changes: Sequence[Tensor]) -> list[Tensor]:
        """Return the changes of statistics over all ranks, from this rank's changes."""
        with self.waiting():
            return self._synchroniser.changes(changes, self._part, "statistics")

    def _reduce(self, parameters: Sequence[nn.Parameter], place: str, *, ask: bool) -> _Sent:
        name = f"gradients.{place}"
        # There is nobody to ask; but what is kept of gradients needs all of them in every step.
        if self.size == 1 and not self.delays_gradients:
            gradients, _ = self._synchroniser.gradients(
                [parameter.grad for parameter in parameters], self._part, name, place
            )
            along = [self._control()] if ask and self._together else []
            return gradients, along
        # A parameter that only some ranks have used counts as one without a gradient on the others.
        there = [parameter.grad is not None for parameter in parameters]
        local = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in parameters
        ]
        used = torch.tensor(there, dtype=torch.float32, device=self._device)
        along = [used, self._control()] if ask else [used]
        gradients, summed = self._synchroniser.gradients(local, self._part, name, place, along)
        by_any = (summed[0] if summed else used).tolist()
        reduced = [
            g if count or self._has_come(g) else None
            for g, count in zip(gradients, by_any, strict=True)
        ]
        return reduced, summed[1:]

    def _has_come(self, gradient: Tensor | None) -> bool:
        """Return whether a gradient of an earlier step has arrived only now."""
        return self.delays_gradients and gradient is not None and bool(gradient.any())

    def _assign(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        counts: Sequence[Tensor],
    ) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if counts:
            self._note(counts[0])

    def _control(self) -> Tensor:
        numbers = [*map(float, self._requests), self._divisor]
        # One rank alone does not wait for its GPU to read them back.
        device = self._device if self.size > 1 else None
        return torch.tensor(numbers, dtype=torch.float32, device=device)

    def _note(self, control: Tensor) -> None:
        *self.counts, self.total_count = control.tolist()


def _buckets_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    sizes = [one.numel() * one.element_size() for one in parameters]
    parts = allreduce.in_buckets(sizes, allreduce.BUCKET_BYTES)
    return [[parameters[n] for n in part] for part in parts]


class _Part:
    """This rank's part of the rows of a global batch; see `Share`.

    Args:
        size: number of ranks.
        fraction: its rows over those of the global batch; ``None`` where all ranks have equally
            many.
    """

    def __init__(self, size: int, fraction: float | None = None) -> None:
        self.size = size
        self._fraction = fraction

    @property
    def fraction(self) -> float:
        """This rank's part of the rows."""
        return 1.0 / self.size if self._fraction is None else self._fraction

    def term(self, tensor: Tensor) -> Tensor:
        """Return this rank's term of a mean over the rows of all ranks (`total` ends it)."""
        if self._fraction is None:
            return tensor
        # 0 times NaN is 0 here: a rank without rows has no say.
        return tensor * self._fraction if self._fraction else torch.zeros_like(tensor)

    def total(self, summed: Tensor) -> Tensor:
        """Return the mean, given the sum of all ranks' terms."""
        if self._fraction is None and self.size > 1:
            return summed / self.size
        return summed


class TensorCollectives:
    """Sums of tensors, as `horovod_spark_runner.sync` needs them.

    Attributes:
        through_host: sum in the host's memory, as NCCL refuses ranks that share a GPU.
    """

    through_host = False

    def __init__(self) -> None:
        self._sent = self._whole = 0.0

    @property
    def size(self) -> int:
        """The number of ranks; 1 in a process that has not joined them."""
        return int(hvd.size()) if hvd.is_initialized() else 1

    def sum(self, tensors: Sequence[Tensor | np.ndarray], name: str) -> list[Tensor]:
        """Return each tensor's sum over all ranks; every rank must call it with the same shapes.

        All tensors of one type go in one message.

        Args:
            tensors: dense tensors, or arrays.
            name: the same on all ranks, and different for every call within one step.
        """
        detached = [torch.as_tensor(tensor).detach() for tensor in tensors]
        if self.size == 1:
            return [tensor.clone() for tensor in detached]
        groups: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(detached):
            dtype = _summed_as(tensor)
            groups.setdefault(dtype, []).append(index)
        result: list[Tensor] = list(detached)
        for dtype, indices in groups.items():
            parts = [detached[index] for index in indices]
            flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
            label = f"{name}.{dtype_name(dtype)}"
            sent = flat.cpu() if self.through_host else flat
            sent = hvd.synchronize(hvd.allreduce_async_(sent, name=label, op=hvd.Sum))
            flat = sent.to(flat.device)
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
