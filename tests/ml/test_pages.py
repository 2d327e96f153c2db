"""Every example of the pages on compiled functions prints what the page says."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "control_flow.md",
    "fragments.md",
    "mixture_of_experts.md",
    "pathways.md",
    "pipelines.md",
    "programs.md",
    "routing.md",
)
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_print_what_the_page_says(page):
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert sum(bool(expected) for _, expected in blocks) >= 3
    names: dict[str, object] = {}
    for number, (code, expected) in enumerate(blocks):
        file = f"<example {number} of {page}>"
        linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, file, "exec"), names)
        assert printed.getvalue() == expected
