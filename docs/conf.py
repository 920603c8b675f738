"""Sphinx's configuration of the documentation site. ``./scripts/docs`` builds it.

Variables of the environment, which the workflow sets:
    DOCS_URL: where the site will be published; shows the menu of versions.
    DOCS_VERSION: the version's folder there.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

import horovod_spark_runner

logger = getLogger(__name__)

project = "horovod_spark_runner"
author = "The authors of horovod_spark_runner"
release = horovod_spark_runner.__version__
version = os.environ.get("DOCS_VERSION", release)

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
# Single backticks in docstrings are code, as in Markdown.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give the types
napoleon_include_init_with_doc = False
napoleon_use_rtype = False
napoleon_use_ivar = True
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# The test suite runs the notebooks; the site shows what is saved in them.
nb_execution_mode = "off"
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = f"horovod_spark_runner {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sourcelink_suffix = ""
html_theme_options: dict[str, Any] = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navigation_with_keys": False,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc", "sourcelink"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
if url := os.environ.get("DOCS_URL"):
    html_theme_options["switcher"] = {"json_url": f"{url}/switcher.json", "version_match": version}
    html_theme_options["check_switcher"] = False
    html_theme_options["navbar_end"] = ["version-switcher", "theme-switcher"]


def is_generated_accessor(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out the getters and setters of Params, which are made from one table."""
    is_accessor = name[:3] in ("get", "set") and name[3:4].isupper()
    return True if is_accessor and inspect.isfunction(obj) else None


def shorten_defaults(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str, result: str
) -> tuple[str, str] | None:
    """Show defaults that are made anew for each object as an ellipsis."""
    return (signature.replace("<factory>", "..."), result) if signature else None


def check_reference(app: Sphinx, env: Any) -> None:
    """Warn if the reference lacks a public name; warnings fail the build."""
    documented = {name.rpartition(".")[2] for name in env.domaindata["py"]["objects"]}
    missing = {*horovod_spark_runner.__all__} - documented - {"__version__"}
    if missing:
        logger.warning("public names without an entry in docs/reference: %s", sorted(missing))


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", is_generated_accessor)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("env-check-consistency", check_reference)
