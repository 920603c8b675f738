"""Search for the parameters of the best model: `tune`, and what its space is written with."""

from __future__ import annotations

from .call import tune
from .result import TuneResult
from .space import choice, integer, loguniform, uniform

__all__ = ["TuneResult", "choice", "integer", "loguniform", "tune", "uniform"]
