"""Text that the examples are trained on."""

from __future__ import annotations

import pytest

from tests.examples.small import write_words


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A directory of small files of a few words."""
    return write_words(tmp_path_factory.mktemp("text"))
