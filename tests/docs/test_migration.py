"""The scripts of the migration pages train what they say; those of other programs are Python."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.ml.torch.distributor import TorchDistributor

from horovod_spark_runner import HorovodEstimator, HorovodRunner, InvalidInputError
from tests.docs.sessions import BEFORE, ROOT, Pages, snippets_of

PAGES = [
    path for path in sorted((ROOT / "docs" / "migration").glob("*.md")) if path.name != "index.md"
]
# What each page's names hold after its scripts.
RESULTS = {
    "databricks_horovodrunner": """
    assert len(run.results) == 2 and run.results[0] == run.results[1] == accuracy > 0.9
    """,
    "horovod_estimators": """
    assert [len(fitted.summary.placement), len(torch_fitted.summary.placement)] == [2, 2]
    assert fitted.summary.history[-1]["val_accuracy"] > 0.85
    for model in (fitted, torch_fitted):
        right = model.transform(df).filter("prediction = label").count()
        assert right > 0.9 * df.count(), right
    """,
    "horovod_spark_run": """
    assert len(weights) == 2 and weights[0] == weights[1]
    # The function that it learns, the sum of the columns, has the weights 1.
    assert all(abs(weight - 1) < 0.1 for weight in weights[0]), weights[0]
    """,
    "sparktorch": """
    assert predicted.filter("predictions = digit").count() > 0.9 * df.count()
    """,
    "tensorflow_on_spark": """
    from pathlib import Path

    assert len(model.summary.placement) == args.cluster_size == 2
    assert len(model.summary.history) == args.epochs
    assert model.summary.history[-1]["accuracy"] > 0.85
    assert Path(args.model_dir, "model", "model.keras").is_file()
    """,
    "torch_distributor": """
    import numpy as np

    features = torch.tensor((digits.images / 16).reshape(-1, 64), dtype=torch.float32)
    network.load_state_dict(weights)
    assert (network(features).argmax(1).numpy() == digits.target).mean() > 0.9
    for name, weight in weights.items():
        assert np.array_equal(weight, run.results[1][name]), name
    assert model.summary.history[-1]["val_accuracy"] > 0.85
    assert len(model.summary.placement) == 2
    """,
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    pages = Pages(tmp_path_factory.mktemp("migration"))
    yield pages
    pages.end()


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_scripts_after_train(pages: Pages, page: Path) -> None:
    pages.run(page.stem, page.read_text(), textwrap.dedent(RESULTS[page.stem]))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_scripts_before_are_python(page: Path) -> None:
    before = [one for one in snippets_of(page.read_text()) if one.startswith(BEFORE)]
    assert before
    for script in before:
        compile(script, str(page), "exec")


def arguments_in(file: str, owner: str | None, name: str = "__init__") -> set[str]:
    """Return the parameters of a function of Horovod's, which is not imported.

    Args:
        file: its file in Horovod.
        owner: its class, if any.
        name: its name.
    """
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    tree: ast.AST = ast.parse(Path(spec.submodule_search_locations[0], file).read_text())
    if owner is not None:
        tree = next(n for n in ast.walk(tree) if getattr(n, "name", "") == owner)
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    return {one.arg for one in function.args.args} - {"self"}


OTHER_PROGRAMS: dict[str, tuple[Callable[..., object], Callable[[], set[str]]]] = {
    "KerasEstimator": (
        HorovodEstimator,
        lambda: arguments_in("spark/keras/estimator.py", "KerasEstimator"),
    ),
    "TorchEstimator": (
        HorovodEstimator,
        lambda: arguments_in("spark/torch/estimator.py", "TorchEstimator"),
    ),
    "horovod.spark.run": (HorovodRunner, lambda: arguments_in("spark/runner.py", None, "run")),
    "TorchDistributor": (
        HorovodRunner,
        lambda: set(inspect.signature(TorchDistributor).parameters),
    ),
    "sparkdl.HorovodRunner": (HorovodRunner, lambda: {"np", "driver_log_verbosity"}),
    "TFCluster.run": (
        HorovodRunner,
        lambda: {
            *("map_fun", "tf_args", "num_executors", "num_ps", "tensorboard", "input_mode"),
            *("log_dir", "driver_ps_nodes", "master_node", "reservation_timeout", "eval_node"),
        },
    ),
    "TFEstimator": (
        HorovodEstimator,
        lambda: {
            *("train_fn", "tf_args", "export_fn", "batch_size", "cluster_size", "epochs"),
            *("export_dir", "grace_secs", "input_mapping", "input_mode", "model_dir", "num_ps"),
            *("readers", "steps", "tensorboard", "tfrecord_dir"),
        },
    ),
    "SparkTorch": (
        HorovodEstimator,
        lambda: {
            *("inputCol", "labelCol", "torchObj", "iters", "predictionCol", "partitions"),
            *("verbose", "partitionShuffles", "useBarrier", "useVectorOut", "earlyStopPatience"),
            *("miniBatch", "validationPct", "mode", "device"),
        },
    ),
}


@pytest.mark.parametrize("program", OTHER_PROGRAMS)
def test_an_argument_of_another_program_is_answered(program: str) -> None:
    call, arguments = OTHER_PROGRAMS[program]
    for name in sorted(arguments()):
        # Neither by all arguments, nor by one that only looks like it.
        assert not re.search("no argument.*; (it has|if .* is meant)", error_of(call, name))


def error_of(call: Callable[..., object], name: str) -> str:
    try:
        call(**{name: None})
    except InvalidInputError as error:
        return str(error)
    return ""


def test_the_index_lists_all_pages() -> None:
    index = (ROOT / "docs" / "migration" / "index.md").read_text()
    for page in PAGES:
        assert f"]({page.name})" in index
        assert f"\n{page.stem}\n" in index  # on the site
