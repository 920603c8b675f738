"""The structure: imports point downward, heavy packages are loaded at use."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import horovod_spark_runner

PACKAGE = Path(horovod_spark_runner.__file__).parent

# A module may import, at its top level, from its own room and from floors below; so folders form no
# circle, and modules in a room must not, either.
FLOORS: list[set[str]] = [
    {"errors", "_version", "formatting", "frameworks", "machine"},
    {"captured", "imported_modules", "typed_json"},
    {"serialize"},
    {"config", "serialize"},
    {"storage"},
    {"cluster.spark"},
    {"data"},
    {"data.read"},
    {"data.prepare"},
    {"cluster", "cluster.protocol", "cluster.programs"},
    {"cluster.slot"},
    {"cluster.driver", "cluster.worker"},
    {"observe.notebook"},
    {"sync", "observe.console"},
    {"checkpoint"},
    {"observe.event_files"},
    # The loop knows an engine only by name.
    {"training"},
    {"engines", "engines.keras", "engines.torch"},
    {"model", "observe"},
    {"dataset", "run", "export"},
    {"api", "runner", "estimator"},
    {"tune", "planning"},
    {"commands", "testing"},
]
# Third-party packages that a module, or a folder's modules, may import at the top; others at use.
LIGHT = {"numpy", "pyarrow", "cloudpickle", "tqdm"}
ALLOWED = {
    "commands.doctor_checks": LIGHT | {"packaging"},
    "cluster.slot.slot": LIGHT | {"pyspark"},
    "cluster.protocol.network": LIGHT | {"psutil"},
    "estimator": LIGHT | {"pyspark"},
    "model.params": LIGHT | {"pyspark"},
    "model.persistence": LIGHT | {"pyspark"},
    "model.transformer": LIGHT | {"pyspark"},
    "planning.rank": LIGHT | {"mpi4py"},
    "storage.hdfs": LIGHT | {"hdfs_native"},
    "testing.keras_injector": LIGHT | {"keras", "mpi4py"},
    "testing.torch_injector": LIGHT | {"mpi4py"},
    "training.agreement": LIGHT | {"mpi4py"},
    "sync.mpi": LIGHT | {"mpi4py"},
    "training.loop": LIGHT | {"mpi4py"},
    # Loaded on ranks and, but for those of a module that is listed, in Spark's Python workers.
    "engines.keras": LIGHT | {"h5py", "horovod", "keras", "mpi4py", "tensorflow"},
    "engines.keras.engine": LIGHT,
    "engines.keras.saved": LIGHT,
    "engines.torch": LIGHT | {"horovod", "mpi4py", "torch"},
    "engines.torch.engine": LIGHT,
    "engines.torch.torch_callback": LIGHT,
    "engines.torch.torch_model": LIGHT,
    "tune.study": LIGHT | {"optuna"},
}


FRAMEWORKS = ["tensorflow", "keras", "torch", "horovod", "mpi4py"]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "horovod_files" in path.parts:  # modules of Horovod, not of this package
            continue
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__") if name != "__init__" else ""] = path
    return found


MODULES = modules()


def top_level_imports(name: str, path: Path) -> tuple[set[str], set[str]]:
    """Return (own modules, third-party packages) imported when ``name`` is."""
    own: set[str] = set()
    foreign: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            foreign.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            own.update(imported_modules(node, name, path))
    return own, foreign - set(sys.stdlib_module_names) - {"__future__"}


def imported_modules(node: ast.ImportFrom, name: str, path: Path) -> Iterator[str]:
    """Yield the modules of this package that a relative import in the module ``name`` loads."""
    package = [part for part in name.split(".") if part]
    if path.name != "__init__.py":
        package = package[:-1]
    base = package[: len(package) - node.level + 1]
    target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
    for alias in node.names:
        inner = f"{target}.{alias.name}".strip(".")
        yield inner if inner in MODULES else target


def place_of(name: str) -> tuple[int, str]:
    """Return the number of a module's floor, and its room there."""
    room = name
    while room:
        for number, floor in enumerate(FLOORS):
            if room in floor:
                return number, room
        room = room.rpartition(".")[0]
    raise AssertionError(f"{name} is on no floor")


@pytest.mark.thorough
def test_imports_point_downward() -> None:
    upward = []
    for name in filter(None, MODULES):
        number, room = place_of(name)
        for target in filter(None, top_level_imports(name, MODULES[name])[0]):
            target_number, target_room = place_of(target)
            if target_number >= number and target_room != room:
                upward.append(f"{name} imports {target} from beside or above")
    assert upward == []


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


# Rooms that the core never imports, not even inside of functions; with those that may import each.
# The package itself names their public functions, which it loads when they are asked for.
SATELLITES = {
    "commands": set(),
    "export": {""},
    "planning": {"", "commands"},
    "testing": set(),
    "tune": {"commands"},
}


def test_nothing_outside_of_satellites_imports_them() -> None:
    found = {
        (name, target)
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
        for target in imported_modules(node, name, path)
        if (room := target.partition(".")[0]) in SATELLITES
        and name.partition(".")[0] not in {room, *SATELLITES[room]}
    }
    assert found == set()


def test_heavy_packages_are_imported_where_they_belong() -> None:
    heavy = {
        name: foreign
        for name, path in MODULES.items()
        if name and (foreign := top_level_imports(name, path)[1] - allowed_in(name))
    }
    assert heavy == {}
    assert [name for name in ALLOWED if name not in MODULES] == []


def allowed_in(name: str) -> set[str]:
    """Return the packages that a module may import: those of its own entry, or its folder's."""
    while name and name not in ALLOWED:
        name = name.rpartition(".")[0]
    return ALLOWED.get(name, LIGHT)


def test_the_loop_knows_no_framework() -> None:
    """Not inside of functions either; engines are imported by name, and MPI is no framework."""
    found = {
        (name, package)
        for name, path in MODULES.items()
        if name.startswith("training")
        for package in all_imports(path)
    }
    assert {(name, package) for name, package in found if package in FRAMEWORKS[:-1]} == set()


def all_imports(path: Path) -> set[str]:
    """Return the packages that a module imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize(
    ("used", "heavy"),
    [
        # By itself, the package is as good as nothing.
        ("h", [*FRAMEWORKS, "pyspark", "petastorm", "pyarrow", "IPython", "ipywidgets"]),
        # What a driver does with these, tests/mpi/test_driver.py looks at.
        (
            "h.run_training, h.HorovodRunner, h.HorovodEstimator, h.prepare_dataset, "
            "h.plan_training",
            [*FRAMEWORKS, "IPython", "ipywidgets"],
        ),
        # Engines are loaded on the driver; the doctor runs where a framework is broken.
        (
            "import horovod_spark_runner.engines.keras.engine, "
            "horovod_spark_runner.engines.torch.engine, horovod_spark_runner.commands.doctor",
            FRAMEWORKS,
        ),
        # Spark's Python workers are no ranks, and may have neither Horovod nor MPI.
        (
            "import horovod_spark_runner.engines.keras.evaluate, "
            "horovod_spark_runner.engines.torch.evaluate",
            ["mpi4py", "horovod"],
        ),
    ],
)
def test_importing_loads_no_framework(used: str, heavy: list[str]) -> None:
    code = (
        f"import sys, horovod_spark_runner as h; {used};"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names() -> None:
    assert horovod_spark_runner.__all__ == sorted(horovod_spark_runner.__all__)
    assert set(horovod_spark_runner.__all__) == {
        "Allreduce",
        "AsyncServer",
        "CheckpointError",
        "CheckpointOptions",
        "DataError",
        "DataOptions",
        "Dataset",
        "DiLoCo",
        "EnvironmentProblem",
        "HorovodEstimator",
        "HorovodRunner",
        "HorovodSparkError",
        "InitialWeights",
        "InvalidInputError",
        "LaunchError",
        "LaunchOptions",
        "Link",
        "LocalSGD",
        "MlflowOptions",
        "ModelError",
        "MpiOptions",
        "NotEnoughSlotsError",
        "PowerSGD",
        "PreemptedError",
        "RankFailedError",
        "RanksDivergedError",
        "RestartOptions",
        "RunCancelledError",
        "RunDirectoryError",
        "RunFailedError",
        "RunResult",
        "StalledError",
        "StorageError",
        "TFTransformer",
        "Threshold",
        "TopK",
        "TorchCallback",
        "TorchEarlyStopping",
        "TorchModel",
        "TorchTransformer",
        "TrainingPlan",
        "UnreachableError",
        "__version__",
        "attempt",
        "export_pipeline",
        "plan_training",
        "prepare_dataset",
        "report_progress",
        "run_training",
        "training_steps",
    }
    for name in horovod_spark_runner.__all__:
        assert getattr(horovod_spark_runner, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'run_trainnig'"):
        horovod_spark_runner.run_trainnig  # noqa: B018


def documented(doc: str, section: str) -> set[str]:
    """Return the names that a section of a docstring explains."""
    lines = re.search(rf"^{section}:\n((?:(?: .*)?\n)+)", doc + "\n", re.M)
    found = re.findall(r"^    ([\w, ]+):", lines[1], re.M) if lines else []
    return {name.strip() for names in found for name in names.split(",")}


def public_callables() -> dict[str, Any]:
    """Return the public functions, classes (for their constructors), methods and properties."""
    found: dict[str, Any] = {}
    for name in horovod_spark_runner.__all__:
        thing = getattr(horovod_spark_runner, name)
        if inspect.isfunction(thing):
            found[name] = thing
        elif inspect.isclass(thing) and not issubclass(thing, Exception):
            found[name] = thing
            for member, value in vars(thing).items():
                value = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if not member.startswith("_") and inspect.isfunction(value):
                    found[f"{name}.{member}"] = value
    return found


# What users get from functions and do not make themselves.
NOT_MADE_BY_USERS = {"TFTransformer", "TorchTransformer", "Dataset", "TrainingPlan"}
_CALLBACK = (
    "on_train_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_train_end",
    "state_dict", "load_state_dict",
)  # fmt: skip
# These raise nothing of their own; the others say what.
SAYS_NOTHING_OF_ERRORS = {
    "TorchCallback",
    *(f"{cls}.{name}" for cls in ("TorchCallback", "TorchEarlyStopping") for name in _CALLBACK),
    "CheckpointOptions.best_is_highest",
    "Dataset.delete",
    "Dataset.rows",
    "RunResult",
    "RunResult.result",
    "TrainingPlan.as_json",
    "attempt",
    "report_progress",
}


def test_what_is_public_says_what_it_takes_and_raises() -> None:
    for name, thing in public_callables().items():
        doc = inspect.getdoc(thing) or ""
        assert doc.partition("\n")[0].endswith("."), f"{name} has no first sentence"
        if name in NOT_MADE_BY_USERS:
            continue
        taken = set(inspect.signature(thing).parameters) - {"self", "cls"}
        assert documented(doc, "Args") | documented(doc, "Attributes") >= taken, name
        raised = documented(doc, "Raises")
        assert bool(raised) != (name in SAYS_NOTHING_OF_ERRORS), name
        assert raised <= {*dir(horovod_spark_runner), *dir(builtins)}, name


def test_what_trains_says_all_it_raises() -> None:
    errors = {
        name
        for name in horovod_spark_runner.__all__
        if inspect.isclass(thing := getattr(horovod_spark_runner, name))
        and issubclass(thing, Exception)
    }
    bases = {"HorovodSparkError", "RunFailedError"}
    saving = {"StorageError"}
    doc = inspect.getdoc(horovod_spark_runner.run_training) or ""
    assert documented(doc, "Raises") == errors - bases - saving
