"""Compressed gradients as the papers have them, of all ranks in one process, for comparison.

Each is written as plainly as can be, a rank after the other and a tensor after the other, and takes
the terms that ranks add up: ``terms[rank][tensor]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Terms = list[list[np.ndarray]]


class Reference:
    """What ranks hand to their optimizers, step by step.

    Attributes:
        residuals: what each rank has not sent, by tensor.
    """

    def __init__(self) -> None:
        self.residuals: Any = None

    def held(self, terms: Terms) -> Terms:
        if self.residuals is None:
            self.residuals = [[np.zeros_like(t) for t in own] for own in terms]
        return [
            [r + t for r, t in zip(rest, own, strict=True)]
            for rest, own in zip(self.residuals, terms, strict=True)
        ]

    def regroup(self, ranks: int) -> None:
        """Go on with other ranks, of which the first has what all had not sent."""
        total = [sum(parts) for parts in zip(*self.residuals, strict=True)]
        self.residuals = [total] + [[np.zeros_like(t) for t in total] for _ in range(ranks - 1)]

    def step(self, terms: Terms) -> list[np.ndarray]:
        raise NotImplementedError


class GradientCompression(Reference):
    """Deep Gradient Compression: top-k of each tensor, with momentum correction and masking."""

    def __init__(self, ratios: Any, momentum: float = 0.0) -> None:
        super().__init__()
        self.ratios, self.momentum = iter(ratios), momentum
        self.velocities: Any = None

    def step(self, terms: Terms) -> list[np.ndarray]:
        if self.velocities is None:
            self.velocities = [[np.zeros_like(t) for t in own] for own in terms]
        ratio = next(self.ratios)
        for rank, own in enumerate(terms):
            for number, term in enumerate(own):
                velocity = self.momentum * self.velocities[rank][number] + term
                self.velocities[rank][number] = velocity
        totals = [np.zeros_like(t) for t in terms[0]]
        held = self.held(self.velocities if self.momentum else terms)
        for rank, own in enumerate(held):
            for number, values in enumerate(own):
                count = max(1, int(np.ceil(ratio * values.size)))
                order = np.argsort(-np.abs(values.ravel()), kind="stable")[:count]
                for place in order:
                    where = np.unravel_index(place, values.shape)
                    totals[number][where] += values[where]
                    values[where] = 0
                    self.velocities[rank][number][where] = 0
        self.residuals = held
        return totals


class AdaptiveThreshold(Reference):
    """Deeplearning4j's threshold encoding, whose threshold adapts itself."""

    def __init__(
        self, start: float, low: float, high: float, momentum: float, most: float | None
    ) -> None:
        super().__init__()
        self.threshold, self.low, self.high = start, low, high
        self.momentum, self.most = momentum, most
        self.velocities: Any = None
        self.steps = 0

    def step(self, terms: Terms) -> list[np.ndarray]:
        if self.velocities is None:
            self.velocities = [[np.zeros_like(t) for t in own] for own in terms]
        self.velocities = [
            [self.momentum * v + t for v, t in zip(moved, own, strict=True)]
            for moved, own in zip(self.velocities, terms, strict=True)
        ]
        held = self.held(self.velocities)
        totals = [np.zeros_like(t) for t in terms[0]]
        step = np.float32(self.threshold)
        sent = size = 0
        for own in held:
            for number, values in enumerate(own):
                for where, value in np.ndenumerate(values):
                    size += 1
                    if abs(value) >= step:
                        sent += 1
                        totals[number][where] += np.sign(value) * step
                        values[where] = value - np.sign(value) * step
        self.steps += 1
        if self.most is not None and self.steps % 5 == 0:
            most = self.most * self.threshold
            held = [[np.clip(values, -most, most) for values in own] for own in held]
        self.residuals = held
        if sent / size > self.high:
            self.threshold *= 2 ** (1 / 20)
        elif sent / size < self.low:
            self.threshold /= 2 ** (1 / 20)
        return totals


class LowRank(Reference):
    """PowerSGD: one step of power iteration from the factors of the step before."""

    def __init__(self, first: dict[int, np.ndarray]) -> None:
        super().__init__()
        self.factors = {n: factor.astype(np.float64) for n, factor in first.items()}

    def step(self, terms: Terms) -> list[np.ndarray]:
        held = self.held(terms)
        totals = [np.sum([own[n] for own in held], axis=0) for n in range(len(held[0]))]
        for own in held:
            for number in range(len(own)):
                if number not in self.factors:
                    own[number] = np.zeros_like(own[number])
        for number, factor in self.factors.items():
            total = totals[number].astype(np.float64)
            left, _ = np.linalg.qr(total @ factor)
            self.factors[number] = total.T @ left
            totals[number] = (left @ self.factors[number].T).astype(np.float32)
            for own in held:
                own[number] = (own[number] - left @ (left.T @ own[number])).astype(np.float32)
        self.residuals = held
        return totals
