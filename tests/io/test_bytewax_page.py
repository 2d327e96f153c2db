"""The programs of docs/bytewax.md print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("bytewax", reason="no wheels for this Python")

PAGE = (Path(__file__).parents[2] / "docs/bytewax.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL)
WORDS = "[('be', 2), ('not', 1), ('or', 1), ('to', 2)]\n"


@pytest.mark.parametrize(
    ("program", "output"), PROGRAMS, ids=["files", "object", "process"]
)
def test_a_program_prints_what_the_page_says(
    program, output, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("to be or\n")
    (tmp_path / "texts/b.txt").write_text("not to be\n")

    exec(compile(program, "page", "exec"), {"__name__": "page"})

    assert capsys.readouterr().out == (output or WORDS)
