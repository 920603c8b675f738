"""What so many ranks would bring on a network, which number is best, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..report.numbers import duration, number, share
from .model import Cluster, Prediction, Workload, epoch_steps, predict

# What distributing has to save of the time of one rank to be worth it.
WORTH = 0.1
# A number of ranks is as good as the fastest if it takes no more than so much longer.
_AS_GOOD = 0.1
# Steps between exchanges that are looked at.
_EVERY = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# LocalSGD is worth naming where it brings so many times as many samples a second.
_PAYS = 1.1
# An exchange takes little where it is no more than this part of a step.
_LITTLE = 0.05


@dataclass(frozen=True)
class NetworkPlan:
    """What a training would take on one network.

    Attributes:
        name: of the network.
        cluster: hosts of this kind.
        predictions: one for each number of ranks, in order, by allreduce; of those for which the
            rows fill a step.
        best: the least number of ranks that is as good as the fastest, to a tenth; of those that
            pay, if any does.
        alone: seconds of one process that needs no launch and whose rows are there.
        break_even: the least number of ranks, above 1, that is faster than ``alone``; ``None``
            if none is.
        break_even_epochs: epochs from which some number of ranks is faster; ``None`` if never.
        every: least steps between exchanges with which LocalSGD, on the best number of ranks,
            exchanges in a twentieth of a step, or, if none up to an epoch's does, the most; 1 where
            it would bring less than a tenth.
        local: the prediction for it; ``None`` where ``every`` is 1.
        left_out: numbers of ranks that were asked for, and whose step takes more rows than an epoch
            has.
    """

    name: str
    cluster: Cluster
    predictions: tuple[Prediction, ...]
    best: Prediction
    alone: float
    break_even: int | None
    break_even_epochs: float | None
    every: int
    local: Prediction | None
    left_out: tuple[int, ...] = ()

    @property
    def pays(self) -> bool:
        """Whether to distribute the training: it saves a tenth of the time of one process."""
        return _pays(self.best, self.alone)

    @property
    def verdict(self) -> str:
        """What to do, with the figures."""
        if not self.pays:
            many = [one for one in self.predictions if one.ranks > 1]
            if not many:
                return "do not distribute this: the rows do not fill a step of two ranks"
            # The least number that comes near to the fastest, as `best` is among all.
            least = min(one.total_seconds for one in many)
            nearest = next(one for one in many if one.total_seconds <= (1 + _AS_GOOD) * least)
            before = nearest.total_seconds - nearest.training_seconds
            return (
                f"do not distribute this: one process takes {duration(self.alone)}, "
                f"{nearest.ranks:,} ranks {duration(nearest.total_seconds)}, of which "
                f"{duration(before)} come before the first epoch"
                f"; a step of {duration(nearest.compute)} of computing would take "
                f"{duration(nearest.step_seconds)}{_later(self.break_even_epochs)}"
            )
        fastest = min(self.predictions, key=lambda one: one.total_seconds)
        return (
            f"{self.best.ranks:,} ranks: {duration(self.best.total_seconds)} in place of "
            f"{duration(self.alone)} of one process, {share(self.best.efficiency, 1)} efficient, "
            f"limited by {self.best.limit}"
            + (
                f"; {fastest.ranks:,} ranks would be the fastest, with "
                f"{duration(fastest.total_seconds)}"
                if fastest.ranks != self.best.ranks
                else ""
            )
        )


def _pays(one: Prediction, alone: float) -> bool:
    """Tell whether ranks save enough of the seconds of one process."""
    return one.ranks > 1 and one.total_seconds <= (1 - WORTH) * alone


def _later(epochs: float | None) -> str:
    if epochs is None:
        return ", so that no number of epochs makes it pay"
    return f"; it is faster from {number(epochs, 3)} epochs on"


def advise(name: str, work: Workload, cluster: Cluster, ranks: Sequence[int]) -> NetworkPlan:
    """Return what a training would take on a cluster, by the number of its ranks.

    Args:
        name: of its network.
        work: what was measured.
        cluster: what the ranks are to run on.
        ranks: the numbers that are looked at, 1 among them.
    """
    # What does not fill a step of all ranks trains with another batch than was measured.
    filled = [
        count for count in sorted(ranks) if count == 1 or count * work.batch_size <= work.rows
    ]
    predictions = tuple(predict(work, cluster, count) for count in filled)
    single = predictions[0]
    alone = work.build + single.training_seconds
    # Where the fastest just pays, what is almost as good may not.
    chosen = [one for one in predictions if _pays(one, alone)] or predictions
    fastest = min(one.total_seconds for one in chosen)
    best = next(one for one in chosen if one.total_seconds <= (1 + _AS_GOOD) * fastest)
    nearest = min(predictions, key=lambda one: one.epoch_seconds)
    faster = [one.ranks for one in predictions if one.ranks > 1 and one.total_seconds < alone]
    saved = single.epoch_seconds - nearest.epoch_seconds
    before = nearest.total_seconds - nearest.training_seconds - work.build
    local = _rounds(work, cluster, best if best.ranks > 1 else nearest)
    return NetworkPlan(
        name=name,
        cluster=cluster,
        predictions=predictions,
        best=best,
        alone=alone,
        break_even=min(faster, default=None),
        break_even_epochs=before / saved if saved > 0 else None,
        every=1 if local is None else local.every,
        local=local,
        left_out=tuple(sorted(set(ranks) - set(filled))),
    )


def _rounds(work: Workload, cluster: Cluster, plain: Prediction) -> Prediction | None:
    """Return the prediction for LocalSGD, if it brings enough."""
    if plain.ranks < 2:
        return None
    # Ranks meet at every epoch's end, too: longer rounds than an epoch there are none.
    steps = epoch_steps(work, plain.ranks)
    found = [predict(work, cluster, plain.ranks, every) for every in _EVERY if every <= steps]
    if not found:
        return None
    chosen = next(
        (one for one in found if one.latency + one.transfer <= _LITTLE * one.step_seconds),
        found[-1],
    )
    pays = chosen.samples_per_second >= _PAYS * plain.samples_per_second
    return chosen if pays else None
