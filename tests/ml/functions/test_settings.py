"""Settings of JAX that travel with a function, and those that cannot."""

from __future__ import annotations

import jax
import pytest

from timelyml.errors import ConfigError
from timelyml.ml.functions import current_settings


@pytest.mark.parametrize("name", ["jax_debug_nans", "jax_debug_infs"])
def test_what_workers_cannot_look_for_is_refused_by_name(name):
    before = current_settings()
    jax.config.update(name, True)
    try:
        with pytest.raises(ConfigError, match=f"with {name}; got it set.*checkify"):
            current_settings()
    finally:
        jax.config.update(name, False)
    assert current_settings() == before
