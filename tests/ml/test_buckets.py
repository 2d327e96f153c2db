"""Buckets are few, waste little, and padding is cut again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.ml.buckets import (
    bucket_size,
    cut_rows,
    num_rows_of,
    on_buckets,
    pad_rows,
)


def test_up_to_4096_rows_there_are_at_most_33_shapes():
    assert len({bucket_size(rows) for rows in range(1, 4097)}) <= 33


def test_padding_costs_about_a_tenth_on_average():
    sizes = range(64, 4097)
    mean = np.mean([bucket_size(rows) / rows for rows in sizes])
    assert mean <= 1.15


@given(st.integers(1, 1 << 20))
def test_a_bucket_holds_its_rows_and_is_its_own_bucket(rows):
    size = bucket_size(rows)
    assert size >= rows
    assert bucket_size(size) == size
    assert rows < 16 or size < rows * 1.25


def test_no_rows_need_no_bucket_and_a_negative_count_is_refused():
    assert bucket_size(0) == 0
    with pytest.raises(ValueError, match="negative row count"):
        bucket_size(-1)


@given(st.integers(0, 40), st.integers(0, 30))
def test_cutting_undoes_padding_and_the_padding_is_zero(rows, extra):
    tree = {
        "x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 1,
        "n": np.arange(rows, dtype=np.int32) + 1,
    }
    padded = pad_rows(tree, rows + extra)
    assert num_rows_of(padded) == rows + extra
    assert not padded["x"][rows:].any()
    back = cut_rows(padded, rows)
    assert all((back[key] == tree[key]).all() for key in tree)


def test_full_rows_are_padded_without_a_copy():
    rows = np.ones((16, 2))
    assert pad_rows(rows, 16) is rows


def test_a_bucket_smaller_than_the_rows_is_refused():
    with pytest.raises(ValueError, match="more rows than the bucket"):
        pad_rows(np.ones(5), 4)


def test_a_row_wise_function_on_buckets_sees_few_shapes():
    seen = set()

    def double(rows):
        seen.add(rows.shape)
        return rows * 2

    for rows in range(1, 65):
        data = np.arange(rows, dtype=np.float32)
        assert (on_buckets(double, data) == data * 2).all()
    assert len(seen) <= 9


def test_columns_of_different_lengths_have_no_row_count():
    with pytest.raises(ValueError, match="leading axes differ"):
        num_rows_of({"a": np.ones(2), "b": np.ones(3)})
