"""The structure: imports point downward, heavy packages are loaded at use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_spark_runner

PACKAGE = Path(horovod_spark_runner.__file__).parent

# A module may import, at its top level, from floors below its own and from its own floor;
# within a floor there must be no cycle.
FLOORS: list[set[str]] = [
    {"errors", "_version", "config", "machine", "quiet", "session", "serialize"},
    {"storage"},
    {"data"},
    {"launch"},
    {"training"},
    {"ml"},
    {
        "runner",
        "api",
        "pipeline",
        "dataset",
        "attempts",
        "runs",
        "doctor",
        "doctor_checks",
        "doctor_rules",
        "doctor_probe",
        "cli",
        "data_command",
        "pack",
    },
]
# Third-party packages each part may import at its top level; the rest at use.
LIGHT = {"numpy", "pyarrow", "cloudpickle", "tqdm"}
ALLOWED = {
    "doctor_rules": LIGHT | {"packaging"},
    "launch.barrier": LIGHT | {"pyspark"},
    "launch.head_start": LIGHT | {"pyspark"},
    "launch.network": LIGHT | {"psutil"},
    "ml.transformer": LIGHT | {"pyspark"},
    "storage.hdfs": LIGHT | {"hdfs_native"},
    "training.architecture": LIGHT | {"keras"},
    "training.agreement": LIGHT | {"mpi4py", "tensorflow"},
    "training.artifact": LIGHT | {"keras"},
    "training.batches": LIGHT | {"keras", "tensorflow"},
    "training.binding": LIGHT | {"keras"},
    "training.build": LIGHT | {"keras", "mpi4py", "tensorflow"},
    "training.callback_state": LIGHT | {"keras"},
    "training.callbacks": LIGHT | {"keras"},
    "training.custom_objects": LIGHT | {"keras"},
    "training.keras_state": LIGHT | {"keras"},
    "training.outputs": LIGHT | {"keras"},
    "training.collectives": LIGHT | {"horovod", "mpi4py", "tensorflow"},
    "training.exchange": LIGHT | {"horovod", "keras", "tensorflow"},
    "training.keeper": LIGHT | {"mpi4py"},
    "training.probe": LIGHT | {"keras"},
    "training.scope": LIGHT | {"tensorflow"},
    "training.sample": LIGHT | {"keras"},
    "training.random_state": LIGHT | {"keras", "tensorflow"},
    "training.losses": LIGHT | {"keras", "tensorflow"},
    "training.metrics": LIGHT | {"horovod", "keras", "tensorflow"},
    "training.optimizers": LIGHT | {"keras"},
    "training.loop": LIGHT | {"horovod", "keras", "mpi4py", "tensorflow"},
    "training.state": LIGHT | {"tensorflow"},
    "training.tensors": LIGHT | {"tensorflow"},
    "training.step": LIGHT | {"tensorflow"},
    "training.model": LIGHT | {"keras"},
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__") if name != "__init__" else ""] = path
    return found


MODULES = modules()


def top_level_imports(name: str, path: Path) -> tuple[set[str], set[str]]:
    """Return (own modules, third-party packages) imported when ``name`` is."""
    own: set[str] = set()
    foreign: set[str] = set()
    package = [part for part in name.split(".") if part]
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            foreign.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                inner = f"{target}.{alias.name}".strip(".")
                own.add(inner if inner in MODULES else target)
    return own, foreign - set(sys.stdlib_module_names) - {"__future__"}


def floor_of(name: str) -> int:
    first = name.partition(".")[0]
    return next(number for number, floor in enumerate(FLOORS) if first in floor)


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_imports_point_downward(name: str) -> None:
    own, _ = top_level_imports(name, MODULES[name])
    upward = [target for target in own if target and floor_of(target) > floor_of(name)]
    assert not upward, f"{name} imports {upward} from a floor above"


def test_there_is_no_import_cycle() -> None:
    edges = {name: top_level_imports(name, path)[0] for name, path in MODULES.items() if name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join([*trail, name])}"
        if name not in done:
            for target in edges.get(name, ()):
                visit(target, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_heavy_packages_are_imported_where_they_belong(name: str) -> None:
    _, foreign = top_level_imports(name, MODULES[name])
    assert foreign <= ALLOWED.get(name, LIGHT)


def test_importing_the_package_loads_no_framework() -> None:
    heavy = ["tensorflow", "keras", "torch", "horovod", "mpi4py", "pyspark", "petastorm", "pyarrow"]
    code = (
        "import sys, horovod_spark_runner as h; h.run_training.__doc__ if False else None;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_driver_side_loads_no_framework() -> None:
    heavy = ["tensorflow", "keras", "torch", "horovod", "mpi4py"]
    code = (
        "import sys, horovod_spark_runner as h; h.run_training; h.HorovodRunner; h.TFTransformer;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names() -> None:
    assert horovod_spark_runner.__all__ == sorted(horovod_spark_runner.__all__)
    assert set(horovod_spark_runner.__all__) == {
        "AllreduceOptions",
        "CheckpointError",
        "DataError",
        "Dataset",
        "EnvironmentProblem",
        "HorovodRunner",
        "HorovodSparkError",
        "InvalidInputError",
        "LaunchError",
        "ModelError",
        "NotEnoughSlotsError",
        "PreemptedError",
        "RankFailedError",
        "RanksDivergedError",
        "RunCancelledError",
        "RunDirectoryError",
        "RunFailedError",
        "RunResult",
        "StalledError",
        "TFTransformer",
        "__version__",
        "prepare_dataset",
        "report_progress",
        "run_training",
    }
    for name in horovod_spark_runner.__all__:
        assert getattr(horovod_spark_runner, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'run_trainnig'"):
        horovod_spark_runner.run_trainnig  # noqa: B018


def test_every_public_function_says_what_it_raises() -> None:
    for function in (horovod_spark_runner.run_training, horovod_spark_runner.HorovodRunner.run):
        assert "Raises:" in (function.__doc__ or "")


def test_modules_stay_small() -> None:
    sizes = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
