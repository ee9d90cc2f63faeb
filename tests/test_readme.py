"""The README's Python runs as it stands, top to bottom, as one program."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_python_of_the_readme_runs():
    text = README.read_text("utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert blocks
    namespace = {"__name__": "readme"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(README), "exec")  # errors name README's lines
        exec(code, namespace)
