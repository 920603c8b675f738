"""The documentation site builds without a warning, offline, and can be read on small screens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.browser import DESKTOP, PHONE, Browser

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.thorough


def build(folder: Path, version: str, **variables: str) -> Path:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "docs" / "build_site.py"),
            "--to",
            str(folder / "build"),
            "--publish",
            str(folder / "published"),
        ],
        env={**os.environ, "DOCS_VERSION": version, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "published"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"), "main")


def test_versions_lie_side_by_side(site: Path) -> None:
    for release in ("0.9", "0.10"):
        (site / release).mkdir()
        (site / release / "index.html").touch()
    url = "https://example.org/docs"
    again = build(site.parent, "main", DOCS_URL=url)
    listed = json.loads((again / "switcher.json").read_text())
    assert [entry["version"] for entry in listed] == ["0.10", "0.9", "main"]
    assert listed[-1]["url"] == f"{url}/main/"
    assert "url=0.10/index.html" in (again / "index.html").read_text()
    assert f"{url}/switcher.json" in (again / "main" / "index.html").read_text()


@pytest.mark.parametrize(
    "page",
    ["index", "getting-started", "cheatsheet", "migration/torch_distributor", "benchmarks",
     "reference/training", "architecture", "tutorials/keras_digits"],
)  # fmt: skip
def test_a_page_fits_the_screen(site: Path, tmp_path: Path, page: str) -> None:
    file = site / "main" / f"{page}.html"
    text = file.read_text().replace("<head>", f'<head><base href="{file.as_uri()}">', 1)
    for width in (DESKTOP, PHONE):
        seen = Browser(tmp_path).look(text, width=width)
        assert seen.overflow <= 0, (page, width)
        assert all(one.startswith("file:") for one in seen.loaded)
        assert len(seen.text) > 300
        assert seen.sizes == sorted(set(seen.sizes), reverse=True)


def test_pages_do_not_name_the_builders_home(site: Path) -> None:
    home = f"{Path.home()}/"
    assert not [page for page in site.rglob("*.html") if home in page.read_text()]


def test_a_dead_link_and_a_name_without_an_entry_fail(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text())
    (source / "_static").mkdir()
    (source / "index.md").write_text("# A page\n\n[a link](nowhere.md)\n")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", str(source)]
    done = subprocess.run(
        [*command, str(tmp_path / "site")], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "'run_training'" in done.stderr
