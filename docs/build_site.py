"""Build the documentation site, offline: ``./scripts/docs`` runs this.

    build_site.py [--to DIR] [--publish DIR]

The pages are Markdown files that GitHub shows as well. They are copied to a folder beside generated
ones: README, CHANGELOG and CONTRIBUTING, the tables of parameters and of conformance, the command
line, and the notebooks. Every warning of Sphinx's, such as a dead link, is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from horovod_spark_runner import __version__  # noqa: E402
from horovod_spark_runner.commands import cli, parameters  # noqa: E402
from tests.conformance import table  # noqa: E402

# Pages from elsewhere in the project, by their names on the site.
OTHER_PAGES = {
    "README.md": "getting-started.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "conf/README.md": "configuration-files.md",
}
# What has a page on the site that is made from it.
GENERATED_PAGES = {"tests/conformance/table.py": "conformance.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(?=[)#])")
SWITCHER = "switcher.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "docs", help="where to build")
    parser.add_argument(
        "--publish", type=Path, help="folder of a site: add this version ($DOCS_VERSION) to it"
    )
    arguments = parser.parse_args()
    source, site = arguments.to / "source", arguments.to / "site"
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
    write_sources(source)
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    status = subprocess.run([*command, "--jobs", "auto", source, site], check=False).returncode
    if status:
        raise SystemExit("error: the site was not built, see the warnings above")
    if arguments.publish:
        publish(site, arguments.publish, os.environ.get("DOCS_VERSION", __version__))
    print(f"The site: {site / 'index.html'}")


def write_sources(source: Path) -> None:
    """Write the pages that Sphinx reads."""
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(ROOT / "docs" / "conf.py", source)
    for file, page in OTHER_PAGES.items():
        (source / page).write_text((ROOT / file).read_text())
    (source / "parameters.md").write_text(parameters.page())
    (source / "conformance.md").write_text(table.page())
    (source / "command-line.md").write_text(command_line())
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        (source / "tutorials").mkdir(exist_ok=True)
        shutil.copy(notebook, source / "tutorials")
    origins = {page: file for file, page in OTHER_PAGES.items()}
    for page in source.rglob("*.md"):
        name = str(page.relative_to(source))
        origin = ROOT / origins.get(name, f"docs/{name}")
        text = LINK.sub(partial(_moved, origin.parent, page.parent, source), page.read_text())
        if "DOCS_SOURCES" in os.environ:
            text = text.replace("<this repository>", os.environ["DOCS_SOURCES"].split("/blob/")[0])
        page.write_text(text)


def _moved(origin: Path, folder: Path, source: Path, link: re.Match[str]) -> str:
    """Return the target of a link on the site.

    Args:
        origin: folder of the page's original, in the project.
        folder: the page's folder on the site.
        source: folder of all pages of the site.
        link: the link's target.
    """
    file = (origin / link[1]).resolve()
    if not file.is_relative_to(ROOT):
        return link[1]
    name = str(file.relative_to(ROOT))
    if file.suffix == ".ipynb":
        return os.path.relpath(source / "tutorials" / file.name, folder)
    if page := {**OTHER_PAGES, **GENERATED_PAGES}.get(name):
        moved = source / page
    elif file.is_relative_to(ROOT / "docs"):
        moved = source / file.relative_to(ROOT / "docs")
    elif repository := os.environ.get("DOCS_SOURCES"):
        return f"{repository}/{name}"
    elif file.is_file():  # offered for download
        moved = source / "files" / name
        moved.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, moved)
    else:
        return link[1]
    return os.path.relpath(moved, folder)


def command_line() -> str:
    """Return the page of the commands' help texts."""
    os.environ["COLUMNS"] = "90"
    sections = ["# Command line\n"]
    for parser in all_parsers(cli.make_parser()):
        sections.append(f"## {parser.prog}\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(sections)


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from all_parsers(command)


def publish(site: Path, to: Path, version: str) -> None:
    """Add a version to a published site; its front page leads to the newest release."""
    shutil.rmtree(to / version, ignore_errors=True)
    shutil.copytree(site, to / version)
    versions = [path.parent.name for path in to.glob("*/index.html")]
    releases = sorted(
        (name for name in versions if re.fullmatch(r"\d+(\.\d+)*", name)),
        key=lambda name: [int(part) for part in name.split(".")],
        reverse=True,
    )
    listed = [*releases, *sorted({*versions} - {*releases})]
    url = os.environ.get("DOCS_URL", "..")
    entries = [{"version": name, "url": f"{url}/{name}/"} for name in listed]
    (to / SWITCHER).write_text(json.dumps(entries, indent=1))
    (to / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={listed[0]}/index.html">\n'
    )
    (to / ".nojekyll").touch()  # GitHub leaves out folders such as _static otherwise


if __name__ == "__main__":
    main()
