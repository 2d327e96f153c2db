from __future__ import annotations

import pytest

from timelyml.errors import DuplicateNameError, GraphError
from timelyml.graph.names import NameTable


def claim(names: NameTable, name: str | None, kind: str) -> str:
    name = names.choose(name, kind)
    names.add(name, kind)
    return name


def test_unnamed_parts_are_named_after_their_kind():
    names = NameTable("flow", "operator")
    given = [claim(names, name, "map") for name in (None, "map", None)]
    assert given == ["map", "map-2", "map-3"]
    assert claim(names, None, "filter") == "filter"


def test_a_chosen_name_passes_over_explicit_ones():
    names = NameTable("flow", "operator")
    claim(names, "map-2", "map")
    assert [claim(names, None, "map") for _ in range(2)] == ["map", "map-3"]


def test_an_explicit_name_is_given_once():
    names = NameTable("flow", "operator")
    claim(names, "parse", "map")
    with pytest.raises(
        DuplicateNameError, match="got 'parse' for a map before"
    ) as caught:
        names.choose("parse", "filter")
    assert (caught.value.name, caught.value.kind) == ("parse", "map")


def test_a_name_is_free_until_it_is_added():
    names = NameTable("flow", "operator")
    assert names.choose("parse", "map") == names.choose("parse", "map") == "parse"


@pytest.mark.parametrize("name", ["", "two\nlines", "bell\a", 3])
def test_a_name_that_cannot_be_printed_in_one_line_is_refused(name):
    with pytest.raises(GraphError, match="unusable name"):
        NameTable("flow", "operator").choose(name, "map")


class CountedDict(dict):
    """Counts how often it is searched."""

    searches = 0

    def __contains__(self, key: object) -> bool:
        self.searches += 1
        return super().__contains__(key)


def test_naming_many_parts_of_one_kind_stays_linear():
    names = NameTable("flow", "operator")
    names._kinds = CountedDict()
    for _ in range(1000):
        claim(names, None, "map")
    assert names.choose(None, "map") == "map-1001"
    assert names._kinds.searches < 5000
