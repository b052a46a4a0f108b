"""How Sphinx builds the documentation: ``make docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import bayeslora

project = "bayeslora"
author = "the bayeslora authors"
copyright = author
version = release = bayeslora.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "public_names",
    "verb_help",
    "presentation_math",
    "report_links",
]
exclude_patterns = ["_ext"]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "member-order": "groupwise"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # those of dataclasses, which are their arguments
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "bayeslora"
html_math_renderer = "presentation_math"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "tango"
pygments_dark_style = "native"
