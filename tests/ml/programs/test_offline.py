"""A client without a cluster traces, and says why it runs nothing."""

import numpy as np
import pytest

from timelyml import ml
from timelyml.errors import ProgramError


def test_nothing_runs_without_a_cluster():
    slice_ = ml.OfflineClient().slice({"data": 2})
    double = ml.jit(lambda x: x * 2, slice=slice_)
    with pytest.raises(
        ProgramError, match="function '<lambda>' cannot run; got a client"
    ):
        double(np.ones(2))
    with pytest.raises(ProgramError, match="program '<lambda>' cannot run"):
        ml.program(lambda x: (double(x),))(np.ones(2))


def test_slices_get_names_of_their_own():
    client = ml.OfflineClient()
    assert [client.slice({"data": 2}).name for _ in range(2)] == ["slice0", "slice1"]
    assert client.slice({"x": 2, "y": 3}, name="mine").mesh.axis_sizes == (2, 3)
