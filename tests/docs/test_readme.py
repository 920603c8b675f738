"""What the README shows works as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def run_snippets(text: str, folder: Path, *further: str) -> subprocess.CompletedProcess[str]:
    """Run the Python snippets of a document one after the other, as one script."""
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) >= 3
    script = folder / "snippets.py"
    ending = ["spark.stop()\n"] if "SparkSession" in text else []
    script.write_text("\n".join([*snippets, *further, *ending]))
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run


@pytest.mark.mpi
@pytest.mark.spark
def test_the_snippets_on_testing_run_one_after_the_other(tmp_path: Path) -> None:
    run_snippets((ROOT / "docs" / "testing.md").read_text(), tmp_path)
    for left in Path(os.environ["TMPDIR"]).glob("ompi.*"):  # by Open MPI, as the page says
        assert not [path for path in left.rglob("*") if path.is_file()]
        shutil.rmtree(left)


def test_the_snippets_on_exports_run_one_after_the_other(tmp_path: Path) -> None:
    run = run_snippets((ROOT / "docs" / "export.md").read_text(), tmp_path)
    assert "shape=(2, 1)" in run.stdout


@pytest.mark.spark
def test_the_snippets_on_pipelines_run_one_after_the_other(tmp_path: Path) -> None:
    run = run_snippets((ROOT / "docs" / "pipelines.md").read_text(), tmp_path)
    assert "[7.0, 500.0, 1.0, 0.0]" in run.stdout


@pytest.mark.mpi
@pytest.mark.spark
def test_the_snippets_on_pytorch_run_one_after_the_other(tmp_path: Path) -> None:
    loaded = "import sys\nprint('loaded:', {'tensorflow', 'keras'} & sys.modules.keys())"
    run = run_snippets((ROOT / "docs" / "torch.md").read_text(), tmp_path, loaded)
    assert "torch.Size([2, 10])" in run.stdout
    assert re.search(r"^1[67]\d\d of 1797 right$", run.stdout, re.M)
    assert "loaded: set()" in run.stdout


@pytest.mark.mpi
@pytest.mark.spark
def test_the_snippets_on_searching_run_one_after_the_other(tmp_path: Path) -> None:
    run = run_snippets((ROOT / "docs" / "tune.md").read_text(), tmp_path)
    assert run.stderr.count(": val_loss ") >= 4, "a line for each trial"


@pytest.mark.mpi
@pytest.mark.spark
def test_the_python_snippets_run_one_after_the_other(tmp_path: Path) -> None:
    # "The driver never loads TensorFlow."
    loaded = "import sys\nprint('loaded:', {'tensorflow', 'keras', 'horovod'} & sys.modules.keys())"
    further = [(ROOT / "docs" / name).read_text() for name in ("synchronising.md", "planning.md")]
    run = run_snippets("".join([README, *further]), tmp_path, loaded)
    assert "do not distribute this: one process takes " in run.stdout
    told = "num_workers=2, as many as Spark can run at once: master local[2] has 2 cores"
    assert run.stderr.count(told) == 1
    assert "the DataFrame has no column 'pixels'; it has 'features', 'label'" in run.stdout
    assert run.stdout.splitlines()[-1] == "loaded: set()"


def test_the_commands_shown_exist() -> None:
    for command in re.findall(r"(?:\./)?(scripts/\w+|examples/\w+\.py)", README):
        assert (ROOT / command).exists(), command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in anchors, target


def test_every_promise_has_a_test_that_exists() -> None:
    rows = [
        line.strip("|").split("|")
        for line in (ROOT / "docs" / "promises.md").read_text().splitlines()
        if line.startswith("| ") and "| Test |" not in line
    ]
    assert len(rows) > 40
    for promise, proofs in rows:
        cited = re.findall(r"`([^`]*)::(\w+)`", proofs)
        assert cited, promise
        file = ""
        for path, name in cited:
            file = path or file  # "::test" is one of the file named before
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for path in (ROOT / "horovod_spark_runner").glob("*/**/*.py"):
        if path.stem != "__init__":
            assert f"`{path.stem}`" in text, path
