"""Check Spark's memory limit of Python workers, which holds for ranks, too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...errors import EnvironmentProblem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "spark.executor.pyspark.memory"


def check_memory_limit(spark: SparkSession) -> None:
    """Refuse to start ranks under the limit PySpark puts on its workers.

    It is a limit of the address space (``RLIMIT_AS``, which cannot be raised again), and every
    process that a worker starts inherits it. TensorFlow reserves several times the addresses of the
    memory it uses, CUDA far more, and both abort in C++ code where they get none, without naming
    the cause. How much would do cannot be told beforehand.

    Raises:
        EnvironmentProblem: there is such a limit.
    """
    limit = str(spark.conf.get(SETTING, "") or "")
    if re.fullmatch(r"0*[a-zA-Z]*", limit):
        return
    raise EnvironmentProblem(
        f"{SETTING} is {limit}: Spark makes it a limit of the address space of each Python worker, "
        "which ranks inherit, and under which TensorFlow and CUDA abort, as they reserve far more "
        "addresses than the memory they use. Leave it out, or set it to 0 where a default sets it, "
        "when the Spark session is made; what bounds the memory of ranks is "
        "spark.executor.memoryOverhead"
    )
