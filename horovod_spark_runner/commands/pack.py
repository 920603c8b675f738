"""``horovod-spark-runner pack``: the Python environment as an archive for ``spark.archives``.

The archive works wherever it is unpacked: scripts look for Python beside themselves, Open MPI's
programs for their prefix, and a rank loads the MPI beside its Python before anything that was
built with another path. The interpreter is in it, but not Python's standard library: executors
need the same Python at the same path, or at ``--python-prefix``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem, InvalidInputError
from ..observe.console import show_activity

# Spark unpacks a .tar without the files' permissions: Python could not be executed.
_SUFFIXES = (".tar.gz", ".tgz")
# Executors have Spark's jars; headers, build tools and compiled copies are not needed to run.
_UNNEEDED = (
    "*/__pycache__/*",
    "include/*",
    "lib/python*/site-packages/pyspark/jars/*",
    "lib/python*/site-packages/pyspark/examples/*",
    "lib/python*/site-packages/tensorflow/include/*",
    "lib/python*/site-packages/cmake/*",
    "lib/python*/site-packages/clang/*",
)


@dataclass(frozen=True)
class _Editable:
    """A package installed with ``pip install --editable``, whose code is outside the environment.

    Attributes:
        name: of the distribution.
        hooks: files in site-packages that lead to the code, relative to it.
        modules: importable names it provides.
    """

    name: str
    hooks: tuple[str, ...]
    modules: tuple[str, ...]


def command(arguments: argparse.Namespace) -> int:
    """Make the archive and print how to use it."""
    began = time.monotonic()
    output = pack(
        Path(arguments.output),
        exclude=arguments.exclude,
        python_prefix=arguments.python_prefix,
        force=arguments.force,
        compress_level=arguments.compress_level,
    )
    size, seconds = output.stat().st_size / 1e6, time.monotonic() - began
    print(f"{output}: {size:,.0f} MB, made in {seconds:.0f} s")
    print(usage(output.name, arguments.python_prefix or sys.base_prefix))
    return 0


def usage(name: str, python_prefix: str) -> str:
    """Return how to submit with the archive called ``name``."""
    version = ".".join(str(part) for part in sys.version_info[:2])
    return (
        "Submit with it:\n"
        f"    export PYSPARK_DRIVER_PYTHON={sys.executable}\n"
        "    export PYSPARK_PYTHON=./environment/bin/python\n"
        f"    spark-submit --archives {name}#environment ...\n"
        f"The executors' hosts need Python {version} in {python_prefix}."
    )


def pack(
    output: Path,
    *,
    exclude: Sequence[str] = (),
    python_prefix: str | None = None,
    force: bool = False,
    compress_level: int = 4,
) -> Path:
    """Write the running virtual environment to ``output`` and return it.

    Args:
        output: archive to write; its name ends in one of `_SUFFIXES`.
        exclude: further patterns of files to leave out, relative to the environment.
        python_prefix: where executors have the Python the environment was made with; by default,
            where it is here.
        force: overwrite ``output``.
        compress_level: from 0 (fast) to 9 (small).

    Raises:
        InvalidInputError: the output's name or folder, or another argument, is invalid.
        EnvironmentProblem: this is no virtual environment, or it cannot be packed.
    """
    _check_output(output, force, compress_level)
    _check_environment()
    try:
        import venv_pack
    except ImportError as error:
        raise EnvironmentProblem(
            "venv-pack2 is not installed in this environment; pip install venv-pack2"
        ) from error
    editables = [project for project in map(_find_editable, metadata.distributions()) if project]
    try:
        environment = venv_pack.Env(sys.prefix)
        site = _site_packages(Path(sys.prefix))
        hooks = [f"{site}/{hook}" for editable in editables for hook in editable.hooks]
        for pattern in (*_UNNEEDED, *hooks, *exclude):
            environment = environment.exclude(pattern)
        for editable in editables:
            # It has no way to add files; its list of them is what it packs.
            environment.files.extend(
                venv_pack.File(str(source), f"{site}/{target}")
                for source, target in _module_files(editable)
            )
        environment.files[:] = map(_follow_foreign_link, environment.files)
        with show_activity(f"packing {len(environment.files):,} files"):
            environment.pack(
                str(output), python_prefix=python_prefix, force=force, compress_level=compress_level
            )
    except venv_pack.VenvPackException as error:
        raise EnvironmentProblem(f"venv-pack could not pack {sys.prefix}: {error}") from error
    return output


def _follow_foreign_link(file: Any) -> object:
    """Return ``file`` with its link resolved, if the target is outside the environment.

    Spark refuses to unpack an archive with a link that leads out of it. A virtual environment's
    interpreter is such a link.

    Raises:
        EnvironmentProblem: it links to a folder, or to nothing.
    """
    source = Path(file.source)
    target = source.resolve()
    if not source.is_symlink() or target.is_relative_to(Path(sys.prefix).resolve()):
        return file
    if not target.is_file():
        raise EnvironmentProblem(
            f"{source} links to {target}, which is outside the environment and no file; remove it, "
            f"or leave it out with --exclude '{file.target}'"
        )
    return file._replace(source=str(target))


def _check_output(output: Path, force: bool, compress_level: int) -> None:
    if not output.name.endswith(_SUFFIXES):
        raise InvalidInputError(
            f"the archive's name must end in {' or '.join(_SUFFIXES)}, which Spark unpacks with "
            f"the files' permissions, got {output.name!r}"
        )
    if not output.parent.is_dir():
        raise InvalidInputError(f"the folder {str(output.parent)!r} does not exist")
    if output.exists() and not force:
        raise InvalidInputError(f"{str(output)!r} exists; use --force to overwrite it")
    if not 0 <= compress_level <= 9:
        raise InvalidInputError(f"compress_level must be from 0 to 9, got {compress_level}")


def _check_environment() -> None:
    if (Path(sys.prefix) / "conda-meta").is_dir():
        raise EnvironmentProblem(
            f"{sys.prefix} is a conda environment; pack it with conda-pack, which takes its Python "
            "along: conda install -c conda-forge conda-pack, then conda pack -o OUT.tar.gz"
        )
    if sys.prefix == sys.base_prefix:
        raise EnvironmentProblem(
            f"{sys.executable} is not in a virtual environment; make one (python -m venv), install "
            "your packages there, and run its horovod-spark-runner"
        )


def _site_packages(prefix: Path) -> str:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = f"lib/{version}/site-packages"
    if not (prefix / site).is_dir():
        raise EnvironmentProblem(f"{prefix / site} does not exist: use a virtual environment")
    return site


def _find_editable(distribution: metadata.Distribution) -> _Editable | None:
    """Return ``distribution`` as an `_Editable` if it is an editable install, else ``None``.

    Raises:
        EnvironmentProblem: it does not tell which modules it provides.
    """
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    name = distribution.metadata["Name"]
    modules = tuple((distribution.read_text("top_level.txt") or "").split())
    if not modules:
        raise EnvironmentProblem(
            f"{name} is installed from {origin.get('url')} with --editable and does not tell which "
            "modules it has; install it without --editable"
        )
    files = [str(path) for path in distribution.files or ()]
    hooks = [f for f in files if "/" not in f and (f.endswith(".pth") or f.startswith("__edit"))]
    hooks += [f for f in files if f.endswith(".dist-info/direct_url.json")]
    return _Editable(name, tuple(hooks), modules)


def _module_files(editable: _Editable) -> Iterator[tuple[Path, str]]:
    """Yield every file of the modules and its path, relative to site-packages.

    Raises:
        EnvironmentProblem: a module cannot be found.
    """
    for name in editable.modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise EnvironmentProblem(
                f"the module {name!r} of {editable.name}, installed with --editable, was not "
                "found; install it without --editable"
            )
        origin = Path(spec.origin)
        if spec.submodule_search_locations is None:
            yield origin, origin.name
            continue
        for path in sorted(origin.parent.rglob("*")):
            inner = path.relative_to(origin.parent)
            if path.is_file() and "__pycache__" not in inner.parts:
                yield path, f"{name}/{inner}"
