"""The documentation's configuration (`make docs`)."""

import tilestone

project = "Tilestone"
version = release = tilestone.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Tilestone {release}"
html_show_copyright = False
exclude_patterns = ["requirements.txt"]
myst_heading_anchors = 4
# The names of several fields, such as `bytes`, are also types in signatures.
suppress_warnings = ["ref.python"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
# Type variables and private types in signatures are shown as they are written.
python_maximum_signature_line_length = 88
napoleon_use_ivar = True


def _mark_examples(app, what, name, obj, options, lines):  # noqa: ARG001
    """Marks an indented block before the sections of a docstring as code."""
    for i, line in enumerate(lines):
        if line in ("Args:", "Attributes:", "Returns:", "Raises:"):
            return
        if line.startswith("    ") and i >= 2 and not lines[i - 1] and lines[i - 2][:1].strip():
            lines[i - 1 : i] = ["", "::", ""]
            return


def setup(app):
    # Before napoleon, which rewrites the sections.
    app.connect("autodoc-process-docstring", _mark_examples, priority=400)
