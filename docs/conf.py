"""Sphinx configuration. `make docs` builds the pages into docs/_build/html; neither building nor reading uses a network.

Before Sphinx reads the pages, `setup` copies the lessons into docs/lessons and lets their kernels show timelines as
self-contained pages (`kernel_startup.py`). Figures and tables come from the records under toolkit/bench/results (`figures.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BUILD = DOCS / "_build"
sys.path[:0] = [str(DOCS), str(ROOT)]

import docstrings  # noqa: E402  # this folder is on the path from here on
import figures  # noqa: E402
from jupyter_cache import get_cache  # noqa: E402

from toolkit.core.version import __version__  # noqa: E402

project = "Decode Toolkit"
copyright = "the Decode Toolkit authors, Apache-2.0"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "*.py"]
myst_enable_extensions = ["substitution", "colon_fence", "attrs_inline"]
myst_substitutions = figures.substitutions()
myst_heading_anchors = 3

# Executed pages are cached under the hash of the package, so that a change of the toolkit runs them again.
nb_execution_mode = "cache"
nb_execution_timeout = 240
if os.environ.get("TOOLKIT_DOCS_LESSONS") == "as-stored":  # without running them: for a build after the tests
    nb_execution_excludepatterns = ["lessons/*"]
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # the default loads two scripts from a CDN
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100

html_theme = "pydata_sphinx_theme"
html_title = "Decode Toolkit"
html_static_path = ["_static"]
html_css_files = ["docs.css"]
html_js_files = ["docs.js"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "Decode Toolkit"},
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
}


def package_hash() -> str:
    """Return a hash of every source file of the package and of the kernels' start-up file."""
    total = hashlib.sha256((DOCS / "kernel_startup.py").read_bytes())
    for path in sorted((ROOT / "toolkit").rglob("*")):
        if path.suffix in {".py", ".js", ".css", ".json", ".safetensors", ".trace"}:
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


nb_execution_cache_path = str(BUILD / "executed" / package_hash())


def spread_pages(app: Any, env: Any, pages: list[str]) -> None:
    """Deal the pages out to the parallel processes. Each reads consecutive pages, and most executed ones follow each other."""
    pages[:] = [page for first in range(app.parallel) for page in pages[first :: app.parallel]]


def setup(app: Any) -> None:
    """Prepare what the executed pages need, and connect the docstring converter."""
    for folder in (BUILD / "executed").glob("*"):
        if str(folder) != nb_execution_cache_path:
            shutil.rmtree(folder)
    assert get_cache(nb_execution_cache_path).db  # else parallel processes create it, and all but one fail
    lessons = DOCS / "lessons"
    lessons.mkdir(exist_ok=True)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        copy = lessons / path.name
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            shutil.copyfile(path, copy)
    startup = BUILD / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(DOCS / "kernel_startup.py", startup / "docs.py")
    # Kernels inherit the environment. Their compiled kernels and packages stay out of the user's own cache. The tests may have
    # compiled the pieces that the lessons export.
    tested, cached = ROOT / ".venv" / "exports" / "compiled", BUILD / "cache" / "compiled"
    if cached.is_symlink():
        cached.unlink()  # the folder may be gone
    if tested.is_dir() and not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.symlink_to(tested)
    os.environ.update(IPYTHONDIR=str(BUILD / "ipython"), TOOLKIT_CACHE=str(BUILD / "cache"), OMP_NUM_THREADS="1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    app.connect("env-before-read-docs", spread_pages)
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("autodoc-process-signature", docstrings.signature)
