"""Hyperparameter search: `tune`, and the dimensions of its space."""

from __future__ import annotations

from .call import tune
from .search import TuneResult
from .space import choice, integer, loguniform, uniform

__all__ = ["TuneResult", "choice", "integer", "loguniform", "tune", "uniform"]
