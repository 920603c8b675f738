"""The scripts of the migration pages train what they say; those of other programs are Python."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.sessions import BEFORE, ROOT, Pages, snippets_of

PAGES = sorted((ROOT / "docs" / "migration").glob("*_*.md")) + [
    ROOT / "docs" / "migration" / "sparktorch.md"
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


def test_the_index_lists_all_pages() -> None:
    index = (ROOT / "docs" / "migration" / "index.md").read_text()
    for page in PAGES:
        assert f"]({page.name})" in index
    assert len(index.strip().splitlines()) == len(PAGES) + 2
