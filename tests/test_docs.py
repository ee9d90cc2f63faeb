"""The documentation: links, navigation, public names, the bounds of the README."""

import importlib
import inspect
import pathlib
import re

import numpy as np
import pytest
import test_public_api

from benchmarks import overview

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
URL = re.search(r'^URL = "(.+)"$', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE)[1]
RAW = URL.replace("github.com", "raw.githubusercontent.com")


def prose(page):
    return FENCED.sub("", page.read_text("utf-8"))


def links(page):
    """The targets of a page's links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page):
    """The names of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        for start in (f"{URL}/blob/main/", f"{URL}/tree/main/", f"{RAW}/main/"):
            if target.startswith(start):
                found = ROOT / target.removeprefix(start)
                break
        else:
            assert not target.startswith("http"), f"{link}: neither relative nor under {URL}"
            assert page != ROOT / "README.md", f"{link}: the package index needs absolute links"
            found = page if not target else page.parent / target
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def test_every_page_is_in_the_navigation():
    trees = re.findall(
        r"^```\{toctree\}\n(.*?)^```$", (DOCS / "index.md").read_text("utf-8"), re.M | re.S
    )
    listed = [line for tree in trees for line in tree.split() if not line.startswith(":")]
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} - {"index"}
    assert pages <= set(listed)


def test_every_public_name_is_in_the_api_pages():
    pages = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"^\.\. automodule:: (.+)$", pages, re.MULTILINE))
    assert set(test_public_api.MODULES) <= shown
    for module in shown:  # autodoc leaves out what has no docstring
        for name, found in test_public_api.public(importlib.import_module(module)).items():
            if inspect.isroutine(found) or inspect.isclass(found):
                assert inspect.getdoc(found), f"{module}.{name}"


def test_readme_is_short():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 130
    for row in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        for cell in row.split(" | "):
            words = re.sub(r"\]\([^)]*\)", "]", cell).split()
            assert len(words) <= 12, cell


def test_recall_that_the_pages_give_is_that_of_the_kept_rows():
    """The arms of the README's figure: a table of the results, and three cells of the README."""
    long, few, many = overview.recall().values()
    rows = {
        "softmax": "softmax",
        "mesa": "exact ridge regression (`mesa`)",
        "deltanet": "DeltaNet",
        "vla no ratio rms": 'VLA, `"recall"`',
        "vla": 'VLA, `"published"` and the convolution',
    }
    assert rows.keys() == overview.ARMS.keys()
    table = (DOCS / "results.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for arm, name in rows.items():
        cells = re.search(rf"^\| {re.escape(name)} \| (.+) \|$", table, re.MULTILINE)[1].split(
            " | "
        )
        given = [float(cells[i].split()[0]) for i in (1, 2, 4)]
        means = [np.mean(here[arm]) for here in (few, many, long)]
        np.testing.assert_allclose(given, means, atol=5.001e-4, err_msg=arm)
    for cell in (f"at 4,096: {np.mean(long['vla no ratio rms']):.3f}",
                 f'`"recall"` {np.mean(many["vla no ratio rms"]):.3f}',
                 f"{np.mean(few['vla no ratio rms']):.3f} of 16 pairs"):  # fmt: skip
        assert cell.replace("0.", ".") in readme, cell
