"""Synchronised batch normalisation; single-row check."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import ModelError
from ...training.sample_rows import repeat_rows
from ...training.spec import TrainingSpec
from .binding import BatchBinding
from .exchange import GradientExchange, TensorCollectives
from .model import preserve_random


def synchronise_norms(module: nn.Module, exchange: GradientExchange) -> None:
    """Make all batch-normalisation layers use the moments of all ranks' rows in training.

    Args:
        module: the module.
        exchange: knows this rank's part of the rows, and notes how long sums are waited for.

    Raises:
        ModelError: there is no such layer, or one is called otherwise already.
    """
    layers = {n: layer for n, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    if not layers:
        raise ModelError(f"sync_batch_norm: {type(module).__name__} has no batch normalisation")
    for number, (name, layer) in enumerate(layers.items()):
        from_torch = type(layer).forward.__module__.startswith("torch.nn.")
        if not from_torch or "forward" in vars(layer):
            raise ModelError(
                f"layer {name!r} ({type(layer).__name__}) has a forward of its own, whose place "
                "sync_batch_norm would take: leave one of them out"
            )
        # The layer stays what it is; only its call in a training is another one.
        layer.forward = functools.partial(  # type: ignore[method-assign]
            _forward, layer, f"norm.{number}", exchange
        )


def release_norms(module: nn.Module) -> None:
    """Undo `synchronise_norms`, so that the module can be copied."""
    for layer in module.modules():
        ours = vars(layer).get("forward")
        if isinstance(ours, functools.partial) and ours.func is _forward:
            del layer.forward


def _forward(layer: _BatchNorm, name: str, exchange: GradientExchange, values: Tensor) -> Tensor:
    if not layer.training:
        return type(layer).forward(layer, values)
    dims = [0, *range(2, values.dim())]
    shape = [1, -1, *[1] * (values.dim() - 2)]
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    numbers = wide.numel() / max(1, wide.shape[1])
    if not exchange.fraction:
        # Rows that only stand in count for nothing, whatever the layers before make of them; but
        # these are gone through backwards, as on other ranks.
        wide, numbers = torch.where(torch.zeros_like(wide, dtype=torch.bool), wide, 0.0), 0.0
    rows = torch.full_like(wide.new_empty(1), numbers)
    first = torch.cat([wide.sum(dims), rows])
    sums = _sum_of_ranks(first, f"{name}.mean", exchange)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(shape)
    second = centred.square().sum(dims)
    if not exchange.fraction:
        second = second * 0.0
    variance = _sum_of_ranks(second, f"{name}.variance", exchange) / count
    result = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        result = result * layer.weight.view(shape) + layer.bias.view(shape)
    if layer.track_running_stats:
        _remember(layer, mean.detach(), variance.detach() * count / (count - 1))
    return result.to(values.dtype)


def _remember(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert layer.num_batches_tracked is not None
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.num_batches_tracked.add_(1)
    factor = layer.momentum
    if factor is None:  # the mean of all batches so far
        factor = 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), factor)


def _sum_of_ranks(value: Tensor, name: str, exchange: GradientExchange) -> Tensor:
    summed: Tensor = _SumOfRanks.apply(value, name, exchange)  # type: ignore[no-untyped-call]
    return summed


class _SumOfRanks(torch.autograd.Function):
    """The sum over all ranks, inside a loss.

    Gradients are averaged afterwards by the ranks' parts of the rows, so what comes back to a rank
    is the sum of all ranks' by these parts, over its own.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str, exchange: GradientExchange) -> Tensor:
        ctx.name, ctx.exchange = name, exchange
        with exchange.waiting():
            return TensorCollectives().sum([value], name)[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        part = ctx.exchange.fraction
        term = upstream * part if part else torch.zeros_like(upstream)
        with ctx.exchange.waiting():
            (total,) = TensorCollectives().sum([term], f"{ctx.name}.gradient")
        return total / part if part else torch.zeros_like(total), None, None


def check_lone_rows(
    module: nn.Module, batches: BatchBinding, spec: TrainingSpec, size: int, *, together: bool
) -> None:
    """Check that no step takes moments of one row only, where the module cannot be trained on it.

    Args:
        module: the module, before its first step; it stays as it is.
        batches: makes its inputs.
        spec: the training.
        size: number of ranks.
        together: whether moments are taken of the rows of all ranks.

    Raises:
        ModelError: a batch may have one row for a layer that needs two.
    """
    left = spec.train.rows % spec.global_batch
    if together and size > 1:  # moments are those of all ranks' rows
        shares, usual = [left], spec.global_batch
    else:
        shares = [left * (rank + 1) // size - left * rank // size for rank in range(size)]
        usual = spec.fit.batch_size
    if usual > 1 and 1 not in shares:
        return
    if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        return
    tried = copy.deepcopy(module)
    try:
        with torch.no_grad(), preserve_random():
            batches.call(tried, batches.of(repeat_rows(batches.sample, 1), training=False))
    except ValueError as error:
        whom = "all ranks together" if together else "a rank"
        advice = "choose another batch_size"
        if size > 1 and not together and left != 1:
            advice += ", or sync_batch_norm=True, which takes those of all ranks"
        raise ModelError(
            f"{spec.train.rows} rows in global batches of {spec.global_batch} leave {whom} a "
            f"single row in a step of an epoch, of which {type(module).__name__} cannot take "
            f"moments ({error}); {advice}"
        ) from error
