"""The programs of docs/testing.md print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/testing.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("program", "output"), PROGRAMS, ids=["tester", "script"])
def test_a_program_prints_what_the_page_says(program, output, capsys):
    exec(compile(program, "page", "exec"), {"__name__": "page"})

    assert capsys.readouterr().out == output
