"""Paragraphs of the documentation in Python's standard library: texts that every machine has."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def load_texts(spark: SparkSession, packages: Sequence[str]) -> DataFrame:
    """Return ``text``, a paragraph, and ``label``, the index of the package that it is from."""
    rows = [
        (text, label)
        for label, package in enumerate(packages)
        for text in dict.fromkeys(_paragraphs(package))
    ]
    return spark.createDataFrame(rows, "text string, label int")


def _paragraphs(package: str) -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"]) / package
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, documented):
                for text in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                    if len(words := text.split()) >= 5:
                        yield " ".join(words)
