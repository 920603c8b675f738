"""What the scripts say of machines that lack something."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
COMMON = ROOT / "scripts" / "common.sh"
PROGRAMS = ("bash", "dirname", "head", "sed")


def common(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with the scripts' functions, on a machine that has little else."""
    for program in PROGRAMS:
        found = shutil.which(program)
        assert found is not None
        (folder / program).symlink_to(found)
    return subprocess.run(
        ["bash", "-c", f'source "$0"; {command}', str(COMMON)],
        env={"PATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def make_program(path: Path, script: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("release", "manager", "python", "java", "headers", "compiler"),
    [
        (
            'ID=debian\nVERSION_ID="12"',
            "apt-get",
            "python3 python3-venv python3-dev",
            "openjdk-17-jre-headless",
            "python3.12-dev",
            "g++ make",
        ),
        (
            'ID=debian\nVERSION_ID="13"',
            "apt-get",
            "python3 python3-venv python3-dev",
            "openjdk-21-jre-headless",
            "python3.12-dev",
            "g++ make",
        ),
        (
            'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="22.04"',
            "apt-get",
            "python3 python3-venv python3-dev",
            "openjdk-17-jre-headless",
            "python3.12-dev",
            "g++ make",
        ),
        (
            'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"',
            "apt-get",
            "python3 python3-venv python3-dev",
            "openjdk-21-jre-headless",
            "python3.12-dev",
            "g++ make",
        ),
        (
            'ID="rhel"\nVERSION_ID="9.6"',
            "dnf",
            "python3.11 python3.11-devel",
            "java-21-openjdk-headless",
            "python3.12-devel",
            "gcc-c++ make",
        ),
        (
            'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.5"',
            "dnf",
            "python3.11 python3.11-devel",
            "java-21-openjdk-headless",
            "python3.12-devel",
            "gcc-c++ make",
        ),
        (
            'ID="rhel"\nVERSION_ID="10.0"',
            "dnf",
            "python3 python3-devel",
            "java-21-openjdk-headless",
            "python3-devel",
            "gcc-c++ make",
        ),
    ],
)
def test_what_to_install(
    tmp_path: Path, release: str, manager: str, python: str, java: str, headers: str, compiler: str
) -> None:
    (tmp_path / "os-release").write_text(release)
    make_program(tmp_path / manager)
    hints = "for what in python java compiler make; do install_hint $what; done"
    done = common(
        tmp_path, f"{hints}; install_hint headers 3.12", OS_RELEASE=str(tmp_path / "os-release")
    )
    assert done.stderr == ""
    expected = [python, java, compiler, "make", headers]
    assert done.stdout.splitlines() == [f"{manager} install {packages}" for packages in expected]


def test_a_machine_without_a_release_or_a_known_manager(tmp_path: Path) -> None:
    done = common(tmp_path, "install_hint java", OS_RELEASE=str(tmp_path / "no such file"))
    assert (done.stdout, done.stderr) == ("your system's package manager\n", "")


@pytest.mark.parametrize(
    ("java", "spark", "said"),
    [
        ("11.0.2", None, "Java 17 or newer is needed"),
        ("17.0.15", "4.0.0", ""),
        ("22.0.1", "4.0.0", ""),
        ("24.0.1", "4.1.4", "Spark 4.1 in .* does not start on Java 24 "),
        ("25.0.3", "4.0.5", "Spark 4.0 in .* does not start on Java 25 "),
        ("25.0.3", "4.2.0", ""),
        ("25.0.3", "5.0.0", ""),
        ("25.0.3", None, ""),
    ],
)
def test_java_that_spark_does_not_start_on(
    tmp_path: Path, java: str, spark: str | None, said: str
) -> None:
    make_program(tmp_path / "java", f"echo 'openjdk version \"{java}\" 2026-01-20 LTS' >&2")
    venv = tmp_path / "venv with a blank"
    if spark is not None:
        packages = tmp_path / "packages" / "pyspark.dist-info"
        packages.mkdir(parents=True)
        (packages / "METADATA").write_text(f"Name: pyspark\nVersion: {spark}\n")
        run = f'PYTHONPATH="{packages.parent}" exec "{sys.executable}" "$@"'
        make_program(venv / "bin" / "python", run)
    done = common(tmp_path, "find_java", HSR_VENV=str(venv))
    assert (done.returncode != 0) == bool(said), done.stderr
    assert re.search(said, done.stderr)


def requirements() -> list[Requirement]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = [
        config["options"]["install_requires"],
        *dict(config["options.extras_require"]).values(),
    ]
    lines = [line for text in wanted for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "%"))]


def test_the_floors_are_those_of_setup_cfg() -> None:
    program = str(ROOT / "scripts" / "floors.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    found = {r.name: r.specifier for r in map(Requirement, done.stdout.splitlines())}
    floors = {r.name: s.version for r in requirements() for s in r.specifier if s.operator == ">="}
    assert {name: str(s) for name, s in found.items()} == {n: f"=={v}" for n, v in floors.items()}
    assert len(floors) > 20


@pytest.mark.parametrize(
    ("machine", "package"), [("x86_64", "tensorflow-cpu"), ("aarch64", "tensorflow")]
)
def test_tensorflow_for_cpus_is_a_package_that_the_machine_has(
    tmp_path: Path, machine: str, package: str
) -> None:
    """The extra and the setup choose alike."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.extras_require"]["tensorflow-cpu"].splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    named = {"platform_machine": machine}
    assert [r.name for r in wanted if r.marker and r.marker.evaluate(named)] == [package]
    make_program(tmp_path / "uname", f"echo {machine}")
    done = common(tmp_path, "tensorflow_package")
    assert (done.stdout, done.stderr) == (f"{package}\n", "")
