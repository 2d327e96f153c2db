"""The README's example prints what the README says, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_example_fed_to_stdin_prints_what_the_readme_says():
    (example,) = blocks("python")
    (output,) = blocks("text")

    done = subprocess.run(
        [sys.executable, "-"],
        input=example,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )

    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == output


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))

    mentioned = set(re.findall(r"\bmake ([a-z-]+)", "".join(blocks("sh"))))

    assert mentioned >= {"run", "test"}
    assert mentioned <= targets


def test_every_local_link_leads_to_a_file():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]

    broken = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / link).exists()
    ]

    assert broken == []
