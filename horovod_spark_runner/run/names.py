"""Names of the model's inputs and outputs, asked of a Spark worker: the driver loads no framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import cloudpickle

from ..cluster.driver.launch import explain_spark_error
from ..cluster.protocol.outcome import describe_exception
from ..cluster.spark.python_worker import ask_worker
from ..errors import ModelError
from ..serialize import dumps
from ..training.engine import engine_named
from ..training.spec import ModelNames, ModelSource
from ..typed_json import parse_plain, to_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Answer:
    """What a worker tells: the names, or the traceback of why there are none."""

    names: ModelNames | None = None
    problem: str = ""


@dataclass(frozen=True)
class _Names:
    """Builds the model in one of Spark's Python workers and tells its names."""

    source: bytes = field(repr=False)

    def __call__(self) -> str:
        try:
            source: ModelSource = cloudpickle.loads(self.source)
            return to_json(Answer(engine_named(source.engine).names(source)))
        except Exception as error:  # the function that builds it is the user's
            return to_json(Answer(problem=describe_exception(error)[2]))


def names_of_model(source: ModelSource, spark: SparkSession) -> ModelNames:
    """Build the model once, in one of Spark's Python workers, and return its names.

    Raises:
        ModelError: it cannot be built; with the traceback.
        EnvironmentProblem: Spark's Python lacks something.
        LaunchError: Spark could not run the job.
    """
    try:
        text = ask_worker(spark, _Names(dumps(source)))
    except Exception as error:
        raise explain_spark_error(error) from error
    answer = parse_plain(text, Answer)
    if answer.names is None:
        raise ModelError(
            "feature_cols is not given, and the model, whose inputs may be named like columns, "
            f"could not be built:\n{answer.problem.rstrip()}"
        )
    return answer.names
