"""The Python of the README and of every page of the documentation runs as it stands.

A page is one program, its blocks from top to bottom; of the pages some must not be without any.
"""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [page for page in PAGES if BLOCK.search(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some pages write files
    text = page.read_text("utf-8")
    namespace = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(page), "exec")  # errors name the page's lines
        exec(code, namespace)


def test_readme_and_every_guide_have_programs():
    guides = set((ROOT / "docs" / "guides").glob("*.md"))
    assert guides
    assert guides | {ROOT / "README.md"} <= set(PROGRAMS)
