"""Choose the best number of ranks on a network, and give the reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..formatting import duration, number, share
from .model import Cluster, Prediction, Workload, predict

# Part of one process's time that distributing must save.
_WORTH = 0.1
# A number of ranks is as good as the fastest if it takes at most this much longer.
_AS_GOOD = 0.1


@dataclass(frozen=True)
class NetworkPlan:
    """Predictions for one network.

    Attributes:
        name: of the network.
        cluster: hosts of this kind.
        predictions: one per number of ranks, ascending, as far as the rows fill a step.
        best: the smallest number of ranks that takes at most a tenth longer than the fastest, of
            those that pay if any does.
        alone: seconds of one process, without launching and writing rows.
        break_even: the smallest number of ranks, above 1, that is faster than ``alone``; ``None``
            if none is.
        break_even_epochs: epochs from which some number of ranks is faster; ``None`` if never.
        left_out: requested numbers of ranks whose step takes more rows than an epoch has.
    """

    name: str
    cluster: Cluster
    predictions: tuple[Prediction, ...]
    best: Prediction
    alone: float
    break_even: int | None
    break_even_epochs: float | None
    left_out: tuple[int, ...] = ()

    @property
    def pays(self) -> bool:
        """Whether distributing saves a tenth of the time of one process."""
        return _pays(self.best, self.alone)

    @property
    def verdict(self) -> str:
        """Recommendation, with the figures."""
        fastest = min(self.predictions, key=lambda one: one.total_seconds)
        if self.pays:
            faster = (
                f"; {fastest.ranks:,} ranks would be the fastest, with "
                f"{duration(fastest.total_seconds)}"
            )
            return (
                f"{self.best.ranks:,} ranks: {duration(self.best.total_seconds)} in place of "
                f"{duration(self.alone)} of one process, {share(self.best.efficiency, 1)} "
                f"efficient, limited by {self.best.limit}"
                + (faster if fastest.ranks != self.best.ranks else "")
            )
        many = [one for one in self.predictions if one.ranks > 1]
        if not many:
            return "do not distribute this: the rows do not fill a step of two ranks"
        nearest = _smallest_as_good(many)
        before = nearest.total_seconds - nearest.training_seconds
        later = (
            "no number of epochs makes it pay"
            if self.break_even_epochs is None
            else f"it is faster from {number(self.break_even_epochs, 3)} epochs on"
        )
        return (
            f"do not distribute this: one process takes {duration(self.alone)}, "
            f"{nearest.ranks:,} ranks {duration(nearest.total_seconds)}, of which "
            f"{duration(before)} come before the first epoch; a step of "
            f"{duration(nearest.compute)} of computation would take "
            f"{duration(nearest.step_seconds)}; {later}"
        )


def _pays(one: Prediction, alone: float) -> bool:
    return one.ranks > 1 and one.total_seconds <= (1 - _WORTH) * alone


def _smallest_as_good(predictions: Sequence[Prediction]) -> Prediction:
    fastest = min(one.total_seconds for one in predictions)
    return next(one for one in predictions if one.total_seconds <= (1 + _AS_GOOD) * fastest)


def advise(name: str, work: Workload, cluster: Cluster, ranks: Sequence[int]) -> NetworkPlan:
    """Predict a training on a cluster for several numbers of ranks.

    Args:
        name: of the network.
        work: the measured training.
        cluster: the hosts.
        ranks: numbers of ranks; must contain 1.
    """
    # More ranks than fill a step would train with another batch than was measured.
    filled = [
        count for count in sorted(ranks) if count == 1 or count * work.batch_size <= work.rows
    ]
    predictions = tuple(predict(work, cluster, count) for count in filled)
    single = predictions[0]
    alone = work.build + single.training_seconds
    # If the fastest just pays, one that is almost as good may not.
    best = _smallest_as_good([one for one in predictions if _pays(one, alone)] or predictions)
    nearest = min(predictions, key=lambda one: one.epoch_seconds)
    saved = single.epoch_seconds - nearest.epoch_seconds
    before = nearest.total_seconds - nearest.training_seconds - work.build
    faster = [one.ranks for one in predictions if one.ranks > 1 and one.total_seconds < alone]
    return NetworkPlan(
        name=name,
        cluster=cluster,
        predictions=predictions,
        best=best,
        alone=alone,
        break_even=min(faster, default=None),
        break_even_epochs=before / saved if saved > 0 else None,
        left_out=tuple(sorted(set(ranks) - set(filled))),
    )
