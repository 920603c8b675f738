"""Logs as they go into a history."""

from __future__ import annotations

import numpy as np

from horovod_spark_runner.training.progress import plain


def test_a_metric_of_one_class_is_a_number() -> None:
    assert plain({"f1": np.array([0.5], np.float32)}) == {"f1": 0.5}
    assert plain({"f1": np.array([0.5, 1.0], np.float32)}) == {"f1": [0.5, 1.0]}
