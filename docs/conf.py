"""Configuration of the documentation: ``make docs`` writes it to build/docs."""

import pathlib
import re

import vla_jax

ROOT = pathlib.Path(__file__).parent.parent
URL = re.search(r'^URL = "(.+)"$', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE)[1]

project = "vla-jax"
author = "the vla-jax contributors"
version = release = vla_jax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
root_doc = "index"
html_theme = "furo"
html_title = f"vla-jax {version}"
html_theme_options = {"source_repository": URL, "source_branch": "main",
                      "source_directory": "docs/"}  # fmt: skip
html_copy_source = False
highlight_language = "none"  # of indented blocks: equations and commands

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and dtypes
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def link_to_repository(app, page, source):
    """Relative links that leave docs/ are right in a checkout; here they lead to the repository."""
    folder = (ROOT / "docs" / page).parent

    def absolute(match):
        target, anchor = match[2], match[3] or ""
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs") or not path.exists():
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"{match[1]}({URL}/{kind}/main/{path.relative_to(ROOT)}{anchor})"

    source[0] = re.sub(r"(?<!!)(\[[^\]]*\])\((\.\./[^)#\s]*)(#[^)\s]*)?\)", absolute, source[0])


def indent(line):
    """How far a line is indented."""
    return len(line) - len(line.lstrip())


def to_rst(app, what, name, obj, options, lines):
    """What napoleon and reStructuredText would take for something else in a docstring."""
    text = "\n".join(lines)
    # A list of arguments that goes on in further lines.
    names = r"(?m)^( +(?:\w+,(?: |\n +))+\w+: )"
    text = re.sub(names, lambda match: re.sub(r",\n +", ", ", match[0]), text)
    # An indented paragraph is code, as in Markdown, and no quotation.
    lines[:], code, before = [], None, ""
    for line in text.split("\n"):
        if line and code is not None and indent(line) < code:
            code = None
        starts = line and code is None and before and not lines[-1]
        if starts and indent(line) > indent(before):
            code = indent(line)
            if not before.endswith("::"):
                lines += [" " * indent(before) + "::", ""]
        lines.append(line)
        before = line or before


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", to_rst, priority=400)  # before napoleon
    app.connect("source-read", link_to_repository)
