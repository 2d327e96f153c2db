"""Text, CSV and Parquet files, read by any number of shards."""

from __future__ import annotations

import csv
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml import Dataflow
from timelyml.errors import ConfigError, GraphError, PayloadError, SchemaError
from timelyml.io import byte_ranges
from timelyml.io.byte_ranges import lines_of, share_of

LINES = [f"line {n} " + "x" * (n % 50) for n in range(500)]


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def tag(shard, delivery):
    shard.output().send(delivery.time, [(shard.index, r) for r in delivery.payload])


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_line_is_read_once_and_all_shards_read(cluster, tmp_path, num_shards):
    path = write(tmp_path / "a.txt", "\n".join(LINES) + "\n")
    flow = Dataflow(num_shards=num_shards)
    flow.read_text(path).unary(tag).collect()

    found = cluster.run(flow)["out"]
    assert [line for _, line in found] == LINES
    assert {shard for shard, _ in found} == set(range(num_shards))


def test_several_files_are_read_in_order(cluster, tmp_path):
    for name, lines in (("b.txt", LINES[200:]), ("a.txt", LINES[:200])):
        write(tmp_path / name, "\n".join(lines))
    flow = Dataflow(num_shards=1)
    flow.read_text(str(tmp_path / "*.txt")).collect("pattern")
    flow.read_text([tmp_path / "b.txt", tmp_path / "a.txt"]).collect("list")

    found = cluster.run(flow)
    assert found["pattern"] == LINES
    assert found["list"] == LINES[200:] + LINES[:200]


def test_ends_of_lines_of_either_kind_are_taken_off(cluster, tmp_path):
    flow = Dataflow(num_shards=1)
    flow.read_text(write(tmp_path / "a.txt", "one\r\n\r\ntwo\r\n")).collect("dos")
    flow.read_text(write(tmp_path / "b.txt", "one\n\ntwo")).collect("unix")

    found = cluster.run(flow)
    assert found["dos"] == found["unix"] == ["one", "", "two"]


def test_only_ends_of_lines_part_lines(cluster, tmp_path):
    text = "a\u2028b\x0bc\n\u00e4\n"
    flow = Dataflow(num_shards=1)
    flow.read_text(write(tmp_path / "a.txt", text)).collect()

    assert cluster.run(flow)["out"] == ["a\u2028b\x0bc", "\u00e4"]


def test_blocks_and_epochs_are_counted_on_each_shard(cluster, tmp_path):
    path = write(tmp_path / "a.txt", "\n".join(map(str, range(10))))
    flow = Dataflow(num_shards=1)
    flow.read_text(path, batch_size=3, epoch_every=2).collect()

    found = cluster.run(flow).batches("out")
    assert found == [
        (0, ["0", "1", "2"]),
        (0, ["3", "4", "5"]),
        (1, ["6", "7", "8"]),
        (1, ["9"]),
    ]


def test_text_of_another_encoding_is_refused_by_the_file(cluster, tmp_path):
    path = write(tmp_path / "a.txt", "\u00e4\u00f6\n", "latin-1")
    flow = Dataflow()
    flow.read_text(path, encoding="latin-1").collect()
    assert cluster.run(flow)["out"] == ["\u00e4\u00f6"]

    flow = Dataflow()
    flow.read_text(path).collect()
    with pytest.raises(PayloadError, match=r"a.txt' is not of encoding 'utf-8'"):
        cluster.run(flow)


def test_a_line_of_another_encoding_is_named(tmp_path):
    text = "".join(f"{line}\n" for line in LINES) + "last \u00e4\n"
    path = write(tmp_path / "a.txt", text, "latin-1")
    flow = Dataflow(num_shards=3)
    flow.read_text(path, batch_size=7).collect()

    with pytest.raises(PayloadError, match=r"in line 501; got .* for b'\\xe4'"):
        flow.run()


def test_a_file_that_is_not_there_is_refused_at_the_call(tmp_path):
    with pytest.raises(ConfigError, match="'read_text' has no file to read; got"):
        Dataflow().read_text(tmp_path / "nothing.txt")
    with pytest.raises(ConfigError, match="'words' has no file to read; got"):
        Dataflow().read_text(str(tmp_path / "*.csv"), name="words")
    with pytest.raises(ConfigError, match="'batch_size' out of range; got 0"):
        Dataflow().read_text(__file__, batch_size=0)


@settings(max_examples=150, deadline=None)
@given(
    files=st.lists(
        st.lists(st.text("ab\u00e4", max_size=6), max_size=8), min_size=1, max_size=4
    ),
    has_last_end=st.booleans(),
    num_shards=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 9), st.none() | st.integers(1, 3)),
)
def test_ranges_cover_every_line_once_from_any_position(
    tmp_path_factory, files, has_last_end, num_shards, sizes
):
    directory = tmp_path_factory.mktemp("ranges")
    paths, expected = [], []
    bytes_per_read, most = sizes
    for index, lines in enumerate(files):
        text = "\n".join(lines) + ("\n" if has_last_end and lines else "")
        paths.append(write(directory / f"{index}.txt", text))
        data = text.encode()
        if data:
            expected += data.removesuffix(b"\n").split(b"\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "BYTES_PER_READ", bytes_per_read)
        for shard in range(num_shards):
            batches = []
            for part in share_of(paths, shard, num_shards):
                for found in lines_of(part, 0):
                    batches += byte_ranges.cut_lines(found, most)
            lines = [line for of_batch, _ in batches for line in of_batch]
            assert expected[: len(lines)] == lines
            del expected[: len(lines)]
            for index, (_, end) in enumerate(batches):
                rest = [
                    line
                    for part in share_of(paths, shard, num_shards)
                    if part.base + part.stop > end
                    for found in lines_of(part, end)
                    for line in found.lines
                ]
                assert rest == [line for ls, _ in batches[index + 1 :] for line in ls]
    assert expected == []


ROWS = [(n, n / 4, f"name {n % 7}") for n in range(300)]


def write_csv(path, rows=ROWS, header=("id", "price", "name")):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        if header:
            writer.writerow(header)
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_are_dicts_of_text_by_default(cluster, tmp_path, num_shards):
    paths = [write_csv(tmp_path / f"{n}.csv", ROWS[n::2]) for n in range(2)]
    flow = Dataflow(num_shards=num_shards)
    flow.read_csv(paths).collect()

    found = cluster.run(flow)["out"]
    assert found[0] == {"id": "0", "price": "0.0", "name": "name 0"}
    assert Counter(int(row["id"]) for row in found) == Counter(range(300))


def test_a_schema_makes_columns(cluster, tmp_path):
    path = write_csv(tmp_path / "a.csv")
    flow = Dataflow(num_shards=2)
    rows = flow.read_csv(path, schema={"price": "float32", "name": str, "id": "int16"})
    rows.aggregate("name", {"total": ("sum", "price"), "last": ("max", "id")}).collect()

    found = {}
    for _, payload in cluster.run(flow).batches("out"):
        columns = (c.tolist() for c in payload.values())
        found |= {row[0]: row[1:] for row in zip(*columns, strict=True)}
    assert found == {
        f"name {k}": (
            sum(p for _, p, _ in ROWS[k::7]),
            max(n for n, _, _ in ROWS[k::7]),
        )
        for k in range(7)
    }


def test_every_kind_of_column_is_converted(cluster, tmp_path):
    path = tmp_path / "a.csv"
    write_csv(path, [("true", "2024-05-01", "3", "1e3")], header=("b", "day", "u", "f"))
    schema = {"b": bool, "day": "M8[D]", "u": "uint8", "f": float}
    flow = Dataflow(num_shards=1)
    flow.read_csv(path, schema=schema).collect()

    ((_, payload),) = cluster.run(flow).batches("out")
    assert {name: str(c.dtype) for name, c in payload.items()} == {
        "b": "bool",
        "day": "datetime64[D]",
        "u": "uint8",
        "f": "float64",
    }
    assert payload["b"].tolist() == [True]
    assert payload["f"].tolist() == [1000.0]


def test_files_without_a_header_and_other_delimiters(cluster, tmp_path):
    path = write(tmp_path / "a.csv", "1;x\n2;y\n")
    flow = Dataflow(num_shards=1)
    flow.read_csv(path, columns=["n", "w"], delimiter=";").collect()

    assert cluster.run(flow)["out"] == [{"n": "1", "w": "x"}, {"n": "2", "w": "y"}]


def test_fields_with_ends_of_lines_need_whole_files(cluster, tmp_path):
    rows = [(n, f"first\nsecond {n}") for n in range(50)]
    path = write_csv(tmp_path / "a.csv", rows, header=("n", "text"))
    flow = Dataflow(num_shards=3)
    flow.read_csv(path, has_newlines=True, batch_size=20).collect()
    found = cluster.run(flow)["out"]
    assert [(int(row["n"]), row["text"]) for row in found] == rows

    flow = Dataflow(num_shards=7)
    flow.read_csv(path).collect()
    with pytest.raises(PayloadError, match="pass has_newlines=True"):
        cluster.run(flow)


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize(
    "rows", ['"one\ntwo"\nthree\n', '"one\n\ntwo"', '"one', 'two"\n"three\n']
)
def test_a_field_that_goes_on_in_another_line_is_not_joined(tmp_path, rows, batch_size):
    flow = Dataflow(num_shards=1)
    path = write(tmp_path / "a.csv", "text\n\n" + rows)
    flow.read_csv(path, batch_size=batch_size).collect()
    line = 4 if rows.startswith("two") else 3
    message = f"goes on after the end of line {line};.*pass has_newlines=True"
    with pytest.raises(PayloadError, match=message):
        flow.run()


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = write(tmp_path / "a.csv", "n,m,n\n1,2,3\n")
    with pytest.raises(SchemaError, match=r"two columns.*expected one 'n'"):
        Dataflow().read_csv(path)


def test_a_csv_file_of_another_encoding_is_named(tmp_path):
    path = write(tmp_path / "a.csv", "n\n\N{GREEK SMALL LETTER PI}\n", "utf-16")
    with pytest.raises(PayloadError, match=r"a\.csv' is not of encoding 'utf-8'"):
        Dataflow().read_csv(path)
    late = write(tmp_path / "b.csv", "n\n" + "1\n" * 9000 + "\xe9\n", "latin-1")
    flow = Dataflow(num_shards=1)
    flow.read_csv(late, has_newlines=True).collect()
    with pytest.raises(PayloadError, match=r"b\.csv' is not of encoding 'utf-8'"):
        flow.run()


def test_a_field_that_does_not_convert_is_named(cluster, tmp_path):
    path = write_csv(tmp_path / "a.csv", [(1, 2), (3, "four")], header=("a", "b"))
    flow = Dataflow(num_shards=1)
    flow.read_csv(path, schema={"b": "int64"}).collect()

    with pytest.raises(PayloadError, match="int64 in line 3, column 'b'; got 'four'"):
        cluster.run(flow)


WRONG = {
    "a field": ("many", {"n": "int64"}, r"in line {}, column 'n'; got 'many'"),
    "a number": ("300", {"n": "int8"}, r"in line {}, column 'n'; got '300'"),
    "a row": ("1,2,3", None, r"another length in line {}; got \['1', '2', '3', "),
    "what is no CSV": ("x" * 200_000, None, r"no CSV in line {}; got field larger"),
}


@pytest.mark.parametrize("has_newlines", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_names_the_line(tmp_path, wrong, has_newlines):
    field, schema, message = WRONG[wrong]
    lines = ["n,text"]
    for n in range(99):
        lines += [f'{n},"two\nlines"' if has_newlines else f"{n},one", ""]
    line = "\n".join(lines).count("\n") + 2
    lines += [f"{field},wrong", "1,right"]
    paths = [write_csv(tmp_path / "a.csv", [(1, 2)], header=("n", "text"))]
    paths.append(write(tmp_path / "b.csv", "\n".join(lines) + "\n"))
    flow = Dataflow(num_shards=3)
    flow.read_csv(
        paths, schema=schema, has_newlines=has_newlines, batch_size=10
    ).collect()

    with pytest.raises(
        PayloadError, match=r"b.csv' .*" + message.format(line)
    ) as caught:
        flow.run()
    assert caught.value.line == line


def test_columns_that_a_file_lacks_are_refused_at_the_call(tmp_path):
    path = write_csv(tmp_path / "a.csv")
    with pytest.raises(SchemaError, match=r"lacks a column of the schema; .*'color'"):
        Dataflow().read_csv(path, schema={"color": str})
    rows = Dataflow().read_csv(path, schema={"id": int})
    with pytest.raises(GraphError, match="expected 'color' among them"):
        rows.count("color")


@pytest.fixture
def parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def make(name="a.parquet", rows=100, row_group_size=30, **columns):
        columns = columns or {
            "n": np.arange(rows),
            "x": np.arange(rows) / 8,
            "word": [f"word {n}" for n in range(rows)],
        }
        path = tmp_path / name
        parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
        return path

    return make


@pytest.mark.parametrize("num_shards", [1, 3])
def test_row_groups_are_shared_and_columns_stay_columns(cluster, parquet, num_shards):
    paths = [parquet("a.parquet"), parquet("b.parquet", rows=40)]
    flow = Dataflow(num_shards=num_shards)
    flow.read_parquet(paths, batch_size=20).collect()

    found = [payload for _, payload in cluster.run(flow).batches("out")]
    assert all(len(payload["n"]) <= 20 for payload in found)
    numbers = np.concatenate([payload["n"] for payload in found])
    words = np.concatenate([payload["word"] for payload in found])
    assert Counter(numbers.tolist()) == Counter([*range(100), *range(40)])
    assert words.tolist() == [f"word {n}" for n in numbers]


def test_only_the_columns_that_are_named_are_read(cluster, parquet):
    flow = Dataflow(num_shards=1)
    flow.read_parquet(parquet(), columns=["x"]).collect()

    found = [payload for _, payload in cluster.run(flow).batches("out")]
    assert {tuple(payload) for payload in found} == {("x",)}


def test_missing_values_are_nan_or_what_was_said(cluster, parquet):
    path = parquet(f=[1.0, None], n=[None, 2], w=["a", None])
    flow = Dataflow(num_shards=1)
    flow.read_parquet(path, fill={"n": -1, "w": ""}).collect()
    ((_, payload),) = cluster.run(flow).batches("out")
    assert np.isnan(payload["f"][1])
    assert payload["n"].tolist() == [-1, 2]
    assert payload["w"].tolist() == ["a", ""]

    flow = Dataflow(num_shards=1)
    flow.read_parquet(path).collect()
    with pytest.raises(PayloadError, match="missing values in column 'n'; got 1"):
        cluster.run(flow)


def test_lists_of_one_length_are_rows_of_arrays(cluster, parquet):
    import pyarrow as pa

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(range(12)), 3)
    flow = Dataflow(num_shards=1)
    flow.read_parquet(parquet(v=vectors), batch_size=10).collect()

    ((_, payload),) = cluster.run(flow).batches("out")
    assert np.array_equal(payload["v"], np.arange(12).reshape(4, 3))


def test_columns_that_are_no_arrays_are_refused_at_the_call(parquet):
    with pytest.raises(SchemaError, match="'v' that is no array; got list"):
        Dataflow().read_parquet(parquet(v=[[1], [2, 3]]))
    with pytest.raises(SchemaError, match=r"lacks a column; .*expected 'y' among"):
        Dataflow().read_parquet(parquet(), columns=["y"])
    with pytest.raises(SchemaError, match="other columns than the first file"):
        Dataflow().read_parquet([parquet(), parquet("b.parquet", n=[0.5])])
    with pytest.raises(GraphError, match="expected 'y' among them"):
        Dataflow().read_parquet(parquet()).aggregate("y", {"rows": "count"})


def test_without_pyarrow_the_error_says_what_to_install(parquet, monkeypatch):
    path = parquet()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    with pytest.raises(ConfigError, match=r"needs pyarrow .* pip install 'timelyml"):
        Dataflow().read_parquet(path)
