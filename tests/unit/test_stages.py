"""The tables of an exported pipeline's stages name the same ones."""

from __future__ import annotations

from horovod_spark_runner.export.graph.model import WITHOUT, WRITERS
from horovod_spark_runner.scoring.bundle import KINDS


def test_each_stage_has_a_form_in_onnx_or_a_reason_why_not() -> None:
    assert not WRITERS.keys() & WITHOUT.keys()
    assert WRITERS.keys() | WITHOUT.keys() == KINDS.keys()
