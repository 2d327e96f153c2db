"""The suite sees deliberate mistakes: each breaks a promise under some seed."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS
from timelyml.runtime.simulation import first_failure

MAX_SEEDS = 200


@pytest.mark.sources
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mutation_is_caught(mutate, monkeypatch):
    mutate(monkeypatch)

    failed = first_failure(range(MAX_SEEDS))

    assert failed is not None, mutate.__doc__
    found, expected = failed.violation, MUTATIONS[mutate]
    is_seen = found.promise in expected or (
        found.promise == "failure" and any(words in found.what for words in expected)
    )
    assert is_seen, f"{mutate.__doc__} It fails for another reason: {failed}"
