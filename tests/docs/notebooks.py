"""Run the notebooks in ``examples/`` as Jupyter does.

``python -m tests.docs.notebooks`` saves what they print, for the documentation site.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))
# Printed by Spark's JVM when it starts.
_OF_SPARK = re.compile(r"WARN|log4j|^(Setting default log level|To adjust logging)|^\s*$")
_WIDGET = "application/vnd.jupyter.widget-view+json"


def run_notebook(file: Path, folder: Path) -> Any:
    """Return a notebook with its output, run in a folder by a kernel of its own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def text_of(notebook: Any) -> str:
    """Return all that its cells print and show, as text."""
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )


def _clean(notebook: Any, folder: Path) -> None:
    """Remove what differs from run to run or is Spark's."""
    notebook.metadata.pop("widgets", None)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        kept: list[Any] = []
        for output in cell.outputs:
            if output.output_type == "stream":
                lines = output.text.replace(f"{folder}/", "").splitlines()
                lines = [line for line in lines if not _OF_SPARK.search(line)]
                if not lines:
                    continue
                output.text = "\n".join(lines) + "\n"
                if kept and kept[-1].get("name") == output.name:
                    kept[-1].text += output.text
                    continue
            elif _WIDGET in output.get("data", {}):
                continue
            else:
                for kind, value in output.data.items():
                    output.data[kind] = value.replace(f"{folder}/", "")
            kept.append(output)
        cell.outputs = kept


def main() -> None:
    for file in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = run_notebook(file, Path(folder))
            _clean(notebook, Path(folder))
        nbformat.write(notebook, file)


if __name__ == "__main__":
    main()
