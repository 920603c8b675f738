"""What the scripts say of machines that lack something."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
COMMON = ROOT / "scripts" / "common.sh"
ENVIRONMENT = ROOT / "scripts" / "environment.py"
PROGRAMS = ("bash", "dirname", "head", "realpath", "sed")


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
            "g++",
        ),
        (
            'ID=debian\nVERSION_ID="13"',
            "apt-get",
            "python3 python3-venv python3-dev",
            "openjdk-21-jre-headless",
            "python3.12-dev",
            "g++",
        ),
        (
            'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="22.04"',
            "apt-get",
            "python3 python3-venv python3-dev",
            "openjdk-17-jre-headless",
            "python3.12-dev",
            "g++",
        ),
        (
            'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"',
            "apt-get",
            "python3 python3-venv python3-dev",
            "openjdk-21-jre-headless",
            "python3.12-dev",
            "g++",
        ),
        (
            'ID="rhel"\nVERSION_ID="9.6"',
            "dnf",
            "python3.11 python3.11-devel",
            "java-21-openjdk-headless",
            "python3.12-devel",
            "gcc-c++",
        ),
        (
            'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.5"',
            "dnf",
            "python3.11 python3.11-devel",
            "java-21-openjdk-headless",
            "python3.12-devel",
            "gcc-c++",
        ),
        (
            'ID="rhel"\nVERSION_ID="10.0"',
            "dnf",
            "python3 python3-devel",
            "java-21-openjdk-headless",
            "python3-devel",
            "gcc-c++",
        ),
    ],
)
def test_what_to_install(
    tmp_path: Path, release: str, manager: str, python: str, java: str, headers: str, compiler: str
) -> None:
    (tmp_path / "os-release").write_text(release)
    make_program(tmp_path / manager)
    hints = "for what in python java compiler; do install_hint $what; done"
    done = common(
        tmp_path, f"{hints}; install_hint headers 3.12", OS_RELEASE=str(tmp_path / "os-release")
    )
    assert done.stderr == ""
    expected = [python, java, compiler, headers]
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


def requirements(*extras: str) -> list[Requirement]:
    """Return what setup.cfg asks for, by itself and for ``extras``."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = [config["options"]["install_requires"]]
    wanted += [config["options.extras_require"][extra] for extra in extras]
    lines = [line for text in wanted for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def locked(name: str, **machine: str) -> dict[str, str]:
    """Return the versions in a lock for a machine."""
    lines = (ROOT / "scripts" / "locks" / f"{name}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        one.name: next(iter(one.specifier)).version
        for one in found
        if one.marker is None or one.marker.evaluate(dict(machine))
    }


@pytest.mark.parametrize("python", ["3.10.14", "3.11.9", "3.12.7", "3.13.1"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_locks_hold_what_setup_cfg_asks_for(python: str, machine: str) -> None:
    here = {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "platform_machine": machine,
    }
    demo, tests = locked("demo", **here), locked("tests", **here)
    assert demo.items() <= tests.items()
    wanted = [(demo, ("tensorflow-cpu", "demo")), (tests, ("dev", "torch", "lightning"))]
    for lock, extras in wanted:
        for one in requirements(*extras):
            if one.marker is None or one.marker.evaluate(dict(here)):
                name = one.name.replace("_", "-").lower()
                assert one.specifier.contains(lock[name]), one
    assert not {"torch", "pytest", "ruff"} & demo.keys()
    assert ("tensorflow-cpu" in demo) == (machine == "x86_64")


@pytest.mark.thorough
def test_dead_package_index_is_named_and_the_next_set_up_starts_again(tmp_path: Path) -> None:
    index = "http://127.0.0.1:9/simple"
    environment = {"PIP_INDEX_URL": index, "PIP_NO_CACHE_DIR": "1"}
    venv = tmp_path / "venv"
    first = set_up_in(venv, **environment)
    assert first.returncode == 1
    assert re.search(rf"index.*{index}(?s:.*)HTTPS_PROXY.*PIP_INDEX_URL", first.stderr)
    assert "Traceback" not in first.stderr
    assert set_up_in(venv, "--check", **environment).returncode == 1
    (venv / "lib" / "half_of_a_package").touch()
    assert re.search(rf"{venv}.*caches", set_up_in(venv, **environment).stderr)
    assert not (venv / "lib" / "half_of_a_package").exists()


@pytest.mark.parametrize("folder", ["with a blank", "with:colon"])
def test_folders_that_horovod_cannot_be_built_in_are_refused(tmp_path: Path, folder: str) -> None:
    done = set_up_in(tmp_path / folder)
    assert done.returncode == 1
    assert re.search(rf"{folder}.*HSR_VENV", done.stderr)
    assert not (tmp_path / folder).exists()


def test_a_folder_that_is_somebody_elses_is_refused_and_kept(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years")
    for _ in range(2):
        done = set_up_in(theirs)
        assert done.returncode == 1
        assert re.search(rf"{theirs} .*HSR_VENV", done.stderr)
    assert (theirs / "thesis.txt").read_text() == "years"


def test_a_python_that_is_named_is_the_one(tmp_path: Path) -> None:
    other = tmp_path / "some python"
    make_program(other, "exit 1")
    done = common(tmp_path, "find_python", HSR_PYTHON=str(other))
    assert done.returncode == 1
    assert f"HSR_PYTHON={other}" in done.stderr


@pytest.mark.parametrize(
    "script",
    sorted(
        path.name
        for path in COMMON.parent.iterdir()
        if path.is_file() and path != COMMON and path.suffix != ".py"
    ),
)
def test_every_script_explains_itself(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(COMMON.parent / script), "--help"],
        cwd=tmp_path,
        env={**os.environ, "HSR_VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20
    assert not any(tmp_path.iterdir())


def set_up_in(venv: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Set up what the demo needs in a folder."""
    return subprocess.run(
        [sys.executable, str(ENVIRONMENT), "demo", "--venv", str(venv), *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
