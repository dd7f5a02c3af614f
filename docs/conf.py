"""Sphinx configuration: MyST pages, API facts from the docstrings."""

import refcache

project = "refcache"
author = "the refcache authors"
release = refcache.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "alabaster"
autodoc_member_order = "bysource"
