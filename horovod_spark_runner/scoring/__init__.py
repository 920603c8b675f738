"""Scores rows with pipelines of Spark ML that `export_pipeline` wrote, without Spark and Java.

It needs NumPy, and TensorFlow or onnxruntime where the pipeline has a network.
"""

from __future__ import annotations

from .scorer import Scorer, load_pipeline

__all__ = ["Scorer", "load_pipeline"]
