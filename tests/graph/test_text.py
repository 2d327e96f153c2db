from __future__ import annotations

from textwrap import dedent

import pytest

from timelyml.graph import (
    Contiguous,
    Exchange,
    Gather,
    GraphBuilder,
    InputSpec,
    Pipeline,
)
from timelyml.graph.text import first_difference, summary_text
from timelyml.progress import Summary

from .graphs import first_byte, loop_graph, sink, source, unary, word_count


def text(block: str) -> str:
    return dedent(block).strip()


def test_a_description_has_a_line_an_operator():
    assert word_count(64).describe() == text(
        """
        dataflow words
        0 lines: source; 64 shards; 0 in, 1 out; source
        1 split: flat_map; 64 shards; 1 in, 1 out; in0 <- lines.out0 by pipeline
        2 count: fold; 64 shards; 1 in, 1 out; states state; in0 <- split.out0 by exchange by key
        3 out: sink; 64 shards; 1 in, 1 out; in0 <- count.out0 by pipeline
        """
    )


def test_a_description_names_scopes_and_what_channels_do_to_time():
    assert loop_graph(1).describe() == text(
        """
        dataflow rank
        scope loop
        0 lines: source; 1 shard; 0 in, 1 out; source
        1 merge: concat; 1 shard; in scope loop; 2 in, 1 out; in0 <- lines.out0 by pipeline at (e, 0); in1 <- step.out0 by pipeline at (e, i1+1), cyclic
        2 step: map; 1 shard; in scope loop; 1 in, 1 out; in0 <- merge.out0 by pipeline, cyclic
        3 out: sink; 1 shard; 1 in, 1 out; in0 <- step.out0 by pipeline at (e)
        """
    )


def test_a_description_holds_what_else_an_operator_says():
    builder = GraphBuilder("flow")
    lines = source(builder, regular=True, placement=Contiguous())
    here, later = Summary.identity(0), Summary.advance(0, by=2)
    builder.add_operator(
        "join",
        "join",
        inputs=[InputSpec(lines, Pipeline(dense=True)), InputSpec(lines)],
        num_outputs=2,
        summaries=[[[here], [later]], [[], [here]]],
    )
    assert builder.build().describe() == text(
        """
        dataflow flow
        0 lines: source; 1 shard per worker; 0 in, 1 out; source; regular; placed contiguous
        1 join: join; 1 shard per worker; 2 in, 2 out; placed contiguous; in0 to out1 (e+2); in1 to out0 never; in0 <- lines.out0 by pipeline, dense; in1 <- lines.out0 by pipeline
        """
    )


def test_nested_scopes_are_named_by_their_path():
    builder = GraphBuilder("flow")
    outer = builder.scope("outer")
    source(builder, scope=builder.scope("inner", parent=outer))
    assert "scope outer/inner\n" in builder.build().describe()
    assert "in scope outer/inner;" in builder.build().describe()


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (Summary.identity(0), "(e)"),
        (Summary.enter(1), "(e, i1, 0)"),
        (Summary.leave(2), "(e, i1)"),
        (Summary.advance(2, by=3), "(e, i1, i2+3)"),
        (Summary(1, (4,), (0, 5)), "(e+4, 0, 5)"),
    ],
)
def test_a_summary_shows_where_it_takes_a_time(summary, expected):
    assert summary_text(summary) == expected


def test_the_first_difference_is_none_between_equal_texts():
    assert first_difference("a\nb", "a\nb") is None
    assert first_difference("a\nb", "a\nc") == "line 2: 'b' here, 'c' there"
    assert first_difference("a", "a\nc") == "line 2: nothing here, 'c' there"


def test_a_chart_shows_operators_edges_and_scopes():
    assert loop_graph(4).to_mermaid() == text(
        """
        flowchart LR
          op0(["lines<br/>source<br/>4 shards"])
          op3["out<br/>sink<br/>4 shards"]
          subgraph scope0["loop"]
            op1["merge<br/>concat<br/>4 shards"]
            op2["step<br/>map<br/>4 shards"]
          end
          op0 -->|"pipeline at (e, 0)"| op1
          op2 -->|"pipeline at (e, i1+1)"| op1
          op1 -->|"pipeline"| op2
          op2 -->|"pipeline at (e)"| op3
        """
    )


def test_a_chart_draws_dense_edges_thick():
    builder = GraphBuilder("flow", 2)
    lines = source(builder, regular=True)
    sink(unary(lines, "a", Pipeline(dense=True)), pact=Gather())
    edges = builder.build().to_mermaid().splitlines()[-2:]
    assert edges == [
        '  op0 ==>|"pipeline, dense"| op1',
        '  op1 -->|"gather to 0"| op2',
    ]


def test_a_chart_escapes_names():
    builder = GraphBuilder("flow")
    unary(source(builder), 'say "<hi>" #1', Exchange.by_key(first_byte))
    assert "say #quot;#lt;hi#gt;#quot; #35;1<br/>map" in builder.build().to_mermaid()
