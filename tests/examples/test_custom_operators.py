"""The worked examples of docs/custom_operators.md, against oracles that share no code."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from examples.custom_operators import hash_join, range_shuffle, top_k_router
from timelyml.testing import run_in_orders

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/custom_operators").glob("[!_]*.py"))
PAGE = ROOT / "docs/custom_operators.md"
MAX_LINES = 30

SHARDS = (1, 3, 4)


def in_epochs(rows, num_epochs):
    """A source function: each shard has every n-th row, in `num_epochs` epochs."""

    def source(shard, num_shards):
        for epoch in range(num_epochs):
            mine = slice(shard + epoch * num_shards, None, num_epochs * num_shards)
            yield {name: column[mine] for name, column in rows.items()}

    return source


def rows_by_time(result):
    """The collected rows of each time, as lists of plain values by column."""
    times = defaultdict(lambda: defaultdict(list))
    for time, payload in result.batches("out"):
        for name, column in payload.items():
            times[time][name] += column.tolist()
    return times


def expected_of_token(x, gate, experts, k):
    """The definition of a mixture of experts, for one token, number by number."""
    num_experts = len(experts)
    scores = [sum(a * gate[i][e] for i, a in enumerate(x)) for e in range(num_experts)]
    best = sorted(range(num_experts), key=lambda e: (-scores[e], e))[:k]
    powers = {e: math.exp(scores[e]) for e in best}
    total = [0.0] * len(x)
    for e in best:
        weight = powers[e] / sum(powers.values())
        for j in range(len(x)):
            inner = sum(a * experts[e][i][j] for i, a in enumerate(x))
            total[j] += weight * math.tanh(inner)
    return total


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("homes", SHARDS)
def test_each_token_gets_the_weighted_answers_of_its_best_experts(cluster, homes, k):
    rng = np.random.default_rng(3)
    data = {"token": np.arange(40), "x": rng.normal(size=(40, 4))}
    gate, experts = rng.normal(size=(4, 5)), rng.normal(size=(5, 4, 4))
    source = in_epochs(data, 3)

    flow = top_k_router.mixture(source, gate, experts, k=k, homes=homes)
    found = rows_by_time(cluster.run(flow))

    assert sorted(found) == [0, 1, 2]
    answers = {
        token: answer
        for rows in found.values()
        for token, answer in zip(rows["token"], rows["y"], strict=True)
    }
    assert sorted(answers) == list(range(40))
    for token, answer in answers.items():
        expected = expected_of_token(data["x"][token], gate, experts, k)
        assert answer == pytest.approx(expected, rel=1e-12)  # other order of sums


def test_experts_that_nobody_chose_do_not_run(cluster):
    data = {"token": np.arange(8), "x": np.ones((8, 2))}
    gate = np.array([[0.0, 9.0, 0.0], [0.0, 9.0, 5.0]])  # always 1, then 2

    flow = top_k_router.mixture(data, gate, np.ones((3, 2, 2)), k=2, homes=2)
    run = cluster.start(flow)
    run.result()

    assert run.metrics()["operators"]["experts"]["notifications"] == 2


def test_results_of_the_router_are_the_same_bits_every_time(cluster):
    rng = np.random.default_rng(5)
    data = {"token": np.arange(60), "x": rng.normal(size=(60, 4))}
    gate, experts = rng.normal(size=(4, 5)), rng.normal(size=(5, 4, 4))

    def answers():
        flow = top_k_router.mixture(data, gate, experts, k=3, homes=4)
        return [rows["y"].tobytes() for _, rows in cluster.run(flow).batches("out")]

    assert answers() == answers()


@pytest.mark.parametrize("num_shards", SHARDS)
def test_a_join_has_all_pairs_of_equal_keys_of_a_time(cluster, num_shards):
    rng = np.random.default_rng(11)
    left = {"key": rng.integers(-4, 9, 60), "left": np.arange(60)}
    right = {"key": rng.integers(-9, 7, 90), "right": np.arange(90)}

    flow = hash_join.joined(
        in_epochs(left, 3), in_epochs(right, 3), "key", num_shards=num_shards
    )
    found = Counter(
        (time, *row)
        for time, rows in rows_by_time(cluster.run(flow)).items()
        for row in zip(rows["key"], rows["left"], rows["right"], strict=True)
    )

    def epoch_of(row):  # as `in_epochs` parts them: rows go round shards, then epochs
        return row // num_shards % 3

    expected = Counter(
        (epoch_of(i), a, i, j)
        for i, a in enumerate(left["key"].tolist())
        for j, b in enumerate(right["key"].tolist())
        if a == b and epoch_of(i) == epoch_of(j)
    )
    assert found == expected


@pytest.mark.parametrize("empty", ["left", "right", "both"])
def test_a_join_with_an_empty_side_has_no_rows(cluster, empty):
    rows = {"key": np.arange(5)}
    none = {"key": np.arange(0)}
    left = rows if empty == "right" else none
    right = rows if empty == "left" else none

    flow = hash_join.joined(left, right, "key", num_shards=2)

    assert cluster.run(flow)["out"] == []


def test_the_probe_side_is_answered_as_it_comes_once_the_build_side_is_complete(
    cluster,
):
    flow = hash_join.Dataflow()
    build, probe = flow.input("build"), flow.input("probe")
    hash_join.hash_join(build, probe, "key").unary(
        lambda shard, delivery: shard.emit("joined", delivery.payload["b"].tolist())
    )
    joined = []

    with cluster.start(flow, on_message=lambda *said: joined.append(said[3])) as run:
        run.input("probe").send({"key": np.array([1]), "b": np.array([10])})
        run.input("build").send({"key": np.array([1]), "a": np.array([5])})
        run.input("probe").flush()
        run.input("build").flush()
        assert joined == []
        run.input("build").advance_to(1)
        run.record.wait_until(lambda: len(joined) == 1, 20)
        run.input("probe").send({"key": np.array([1]), "b": np.array([11])})
        run.record.wait_until(lambda: len(joined) == 2, 20)
        assert joined == [[10], [11]]


KEYS = {
    "skewed": lambda rng: rng.lognormal(sigma=2, size=3000),
    "few": lambda rng: rng.integers(0, 3, 3000),
    "equal": lambda rng: np.full(3000, 7),
    "sorted": lambda rng: np.arange(3000),
    "one": lambda rng: np.array([5]),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("num_shards", SHARDS)
def test_a_shuffle_sorts_every_time_over_all_shards(cluster, num_shards, keys):
    data = {"key": keys(np.random.default_rng(13))}
    data["row"] = np.arange(len(data["key"]))

    flow = range_shuffle.shuffled(in_epochs(data, 2), "key", num_shards=num_shards)
    found = rows_by_time(cluster.run(flow))

    assert all(rows["key"] == sorted(rows["key"]) for rows in found.values())
    rows = [row for each in found.values() for row in each["row"]]
    assert sorted(rows) == data["row"].tolist()
    by_row = [key for each in found.values() for key in each["key"]]
    assert by_row == data["key"][rows].tolist()


def test_a_shuffle_balances_what_is_skewed(cluster):
    keys = np.random.default_rng(17).lognormal(sigma=2, size=20_000)

    flow = range_shuffle.shuffled({"key": keys}, "key", num_shards=4)
    sizes = [len(rows["key"]) for _, rows in cluster.run(flow).batches("out")]

    # Four shards sampled 64 keys each: a range is off by less than 4 in 64 of it all.
    assert len(sizes) == 4
    assert max(sizes) < 20_000 / 4 + 20_000 / 16


@pytest.mark.parametrize("name", ["router", "join", "shuffle"])
def test_no_state_is_left(cluster, name):
    rng = np.random.default_rng(19)
    keys = {"key": rng.integers(0, 20, 100)}
    flows = {
        "router": lambda: top_k_router.mixture(
            {"token": np.arange(30), "x": rng.normal(size=(30, 2))},
            rng.normal(size=(2, 3)),
            rng.normal(size=(3, 2, 2)),
            k=2,
            homes=2,
        ),
        "join": lambda: hash_join.joined(keys, keys, "key", num_shards=3),
        "shuffle": lambda: range_shuffle.shuffled(keys, "key", num_shards=3),
    }
    run = cluster.start(flows[name]())
    run.result()

    operators = run.metrics()["operators"]
    left = {each: figures["state_entries"] for each, figures in operators.items()}
    sources = {each for each in left if each in ("source", "build", "probe")}
    assert {each: left[each] for each in left if each not in sources} == dict.fromkeys(
        set(left) - sources, 0
    )


@pytest.mark.parametrize("name", ["router", "join", "shuffle"])
def test_results_do_not_depend_on_the_order_of_arrival(name):
    rng = np.random.default_rng(23)
    keys = in_epochs({"key": rng.integers(0, 20, 80)}, 3)
    data = {"token": np.arange(24), "x": rng.normal(size=(24, 2))}
    gate, experts = rng.normal(size=(2, 3)), rng.normal(size=(3, 2, 2))
    flow = {
        "router": top_k_router.mixture(in_epochs(data, 3), gate, experts, k=2, homes=2),
        "join": hash_join.joined(keys, keys, "key", num_shards=3),
        "shuffle": range_shuffle.shuffled(keys, "key", num_shards=3),
    }[name]

    seen = []

    def note(result):  # blocks of the join come in any order
        seen.append(
            Counter(
                (time, str(row))
                for time, rows in result.batches("out")
                for row in zip(
                    *(column.tolist() for column in rows.values()), strict=True
                )
            )
        )

    run_in_orders(flow, note, num_workers=3)
    assert seen == [seen[0]] * 20
    assert seen[0]


def functions_of(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_operator_is_short(path):
    lengths = {
        node.name: node.end_lineno - node.lineno + 1 for node in functions_of(path)
    }
    assert lengths
    assert {name: n for name, n in lengths.items() if n >= MAX_LINES} == {}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_shows_every_operator_as_it_is(path):
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(
        rf"<!-- {path.relative_to(ROOT)}: (.*?) -->\n```python\n(.*?)```",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    for _, block in blocks:
        assert block in text
    operators = {
        node.name
        for node in functions_of(path)
        if ast.unparse(node.returns or ast.Constant(None)) == "Stream"
    }
    shown = {name for names, _ in blocks for name in names.split(", ")}
    assert operators <= shown


@pytest.mark.parametrize(
    "module", [top_k_router, hash_join, range_shuffle], ids=lambda m: m.__name__[26:]
)
def test_every_example_runs_as_a_program(module, capsys):
    module.main()

    assert capsys.readouterr().out


def test_the_first_program_of_the_page_prints_what_the_page_says(capsys):
    program, output = re.search(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL
    ).groups()

    exec(compile(program, "page", "exec"), {"__name__": "page"})

    assert capsys.readouterr().out == output
