"""What the README shows works as it stands."""

from __future__ import annotations

import ast
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_spark_runner.commands.cli import make_parser
from tests.docs.sessions import Pages

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    pages = Pages(tmp_path_factory.mktemp("snippets"))
    yield pages
    pages.end()


def loaded(*modules: str) -> str:
    """Return the line of a script that prints which of these are loaded."""
    return f"import sys\nprint('loaded:', {set(modules)} & sys.modules.keys())"


# "The driver never loads TensorFlow." These come first, as others may load it in their process.
@pytest.mark.mpi
@pytest.mark.spark
def test_the_python_snippets_run_one_after_the_other(pages: Pages) -> None:
    out, err = pages.run("readme", README, loaded("tensorflow", "keras", "horovod"))
    told = r"num_workers=2\b.*master local\[?2\]?.*\b2 cores"
    assert len(re.findall(told, err)) == 1
    assert re.search("'pixels'.*'features', 'label'", out)
    assert out.splitlines()[-1] == "loaded: set()"


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_the_snippets_on_ways_and_plans_run_one_after_the_other(pages: Pages) -> None:
    more = [(ROOT / "docs" / name).read_text() for name in ("synchronising.md", "planning.md")]
    # They go on from what the README has defined.
    out, _ = pages.run("ways_and_plans", "".join([README, *more]))
    assert re.search(r"^(.*\bdistribute\b|[\d,]+ ranks: )", out, re.M)


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_the_snippets_on_pytorch_run_one_after_the_other(pages: Pages) -> None:
    text = (ROOT / "docs" / "torch.md").read_text()
    out, _ = pages.run("torch_page", text, loaded("tensorflow", "keras"))
    assert "torch.Size([2, 10])" in out
    assert "loaded: set()" in out


# How-to pages, and what the snippets of each print.
HOW_TO = {
    "early-stopping": r"^\d+ epochs, the best is epoch \d+$",
    "images": r"^0\.\d+$",
    "learning-rate": r"^\[0\.1, .*0\.\d+\]$",
    "normalization": r"^\|0\.0\|   A\| *0\.\d+\|$",
    "predict": r"^\['label', 'score'\]$",
    "resume": r"^run_dir .* holds a run on other data: validation is 0\.2 now",
}


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
@pytest.mark.parametrize("page", HOW_TO)
def test_the_snippets_of_a_how_to_page_run_one_after_the_other(pages: Pages, page: str) -> None:
    out, _ = pages.run(page, (ROOT / "docs" / f"{page}.md").read_text())
    assert re.search(HOW_TO[page], out, re.MULTILINE), out


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_the_snippets_on_text_run_one_after_the_other(pages: Pages) -> None:
    out, _ = pages.run("text_page", (ROOT / "docs" / "text.md").read_text())
    accuracies = [float(one) for one in re.findall(r"^\{.*'accuracy': ([\d.]+)", out, re.M)]
    assert len(accuracies) == 3
    assert min(accuracies) > 0.6  # of three classes
    assert out.splitlines()[-1] == "torch.Size([1, 3])"


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_the_snippets_on_searching_run_one_after_the_other(pages: Pages) -> None:
    _, err = pages.run("tune_page", (ROOT / "docs" / "tune.md").read_text())
    assert err.count(": val_loss ") >= 4, "a line for each trial"


@pytest.mark.thorough
@pytest.mark.spark
def test_the_snippets_on_pipelines_run_one_after_the_other(pages: Pages) -> None:
    out, _ = pages.run("pipelines", (ROOT / "docs" / "pipelines.md").read_text())
    assert "[7.0, 500.0, 1.0, 0.0]" in out


@pytest.mark.thorough
@pytest.mark.spark
def test_the_snippets_on_exports_run_one_after_the_other(pages: Pages) -> None:
    out, _ = pages.run("export_page", (ROOT / "docs" / "export.md").read_text())
    assert "shape=(2, 1)" in out


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_the_snippets_on_testing_run_one_after_the_other(pages: Pages) -> None:
    pages.run("testing_page", (ROOT / "docs" / "testing.md").read_text())
    pages.end()
    for left in Path(os.environ["TMPDIR"]).glob("ompi.*"):  # by Open MPI, as the page says
        assert not [path for path in left.rglob("*") if path.is_file()]
        shutil.rmtree(left)


def test_the_commands_shown_exist() -> None:
    for command in re.findall(r"(?:\./)?(scripts/\w+|examples/\w+\.py)", README):
        assert (ROOT / command).exists(), command


def test_the_cheat_sheet_names_files_and_commands_that_exist() -> None:
    text = (ROOT / "docs" / "cheatsheet.md").read_text()
    module = (ROOT / "horovod_spark_runner" / "checkpoint" / "run_directory.py").read_text()
    tree, commands = re.findall(r"```(?:bash)?\n(.*?)```", text, flags=re.DOTALL)
    files = re.findall(r"^    (\S+)", tree, flags=re.MULTILINE)
    assert "report.html" in files
    for file in files:
        assert f"        {file}" in module, file
    lines = [line.partition("#")[0].split()[1:] for line in commands.splitlines()]
    assert ["doctor"] in lines
    for line in lines:
        assert make_parser().parse_args(line), line


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


def test_every_promise_has_a_test_in_the_tier_that_it_names() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "promises.md").read_text().splitlines()
        if line.startswith("| ") and "| Test |" not in line
    ]
    assert len(rows) > 40
    for promise, proofs, named in rows:
        cited = re.findall(r"`([^`]*)::(\w+)`", proofs)
        assert cited, promise
        file, tiers = "", set()
        for path, name in cited:
            file = path or file  # "::test" is one of the file named before
            tiers |= tiers_of(ROOT / file, name)
        assert named in ("by hand", ", ".join(sorted(tiers))), promise
        assert "core" in tiers or promise.startswith(THOROUGH_ONLY), promise


# Promises whose tests take minutes, or what few machines have.
THOROUGH_ONLY = ("A Horovod with NCCL", "A packed environment", "Slow links")


def tiers_of(file: Path, name: str) -> set[str]:
    """Return the tiers of a test: by the marks of its file, its own, and those of its cases."""
    tree = ast.parse(file.read_text())
    marks = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "pytestmark"
    ]
    function = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    if any("mark.thorough" in mark for mark in marks) or "pytest.mark.thorough" in decorators:
        return {"thorough"}
    return {"core", *(["thorough"] if any("mark.thorough" in one for one in decorators) else [])}


def test_the_architecture_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "horovod_spark_runner"
    folders = {path.parent.relative_to(package).as_posix() for path in package.rglob("*.py")}
    named = set(re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE))
    copies = {name for name in folders if "horovod_files" in name}
    assert named == folders - {"."} - copies


def test_the_layout_of_a_run_directory_is_that_of_its_module() -> None:
    module = (ROOT / "horovod_spark_runner" / "checkpoint" / "run_directory.py").read_text()
    layout = textwrap.dedent(module.split("::\n\n", 1)[1].split('"""', 1)[0]).strip()
    assert f"```\n{layout}\n```" in (ROOT / "docs" / "architecture.md").read_text()
