"""Every example of docs/programs.md prints what the page says."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from pathlib import Path

PAGE = (Path(__file__).parent.parent / "docs" / "programs.md").read_text()
BLOCKS = re.findall(
    r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```)?", PAGE, re.MULTILINE | re.DOTALL
)


def test_the_examples_print_what_the_page_says():
    names: dict[str, object] = {}
    for number, (code, expected) in enumerate(BLOCKS):
        file = f"<example {number} of programs.md>"
        linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, file, "exec"), names)
        assert printed.getvalue() == expected


def test_the_page_has_examples_with_output():
    assert sum(bool(expected) for _, expected in BLOCKS) >= 3
