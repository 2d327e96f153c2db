"""The fluent form of a mixture-of-experts layer, wherever it runs."""

import jax
import numpy as np

from timelyml import Dataflow, ml

TOLERANCE = 1e-6  # float32, a few additions in another order


def test_a_stream_of_tokens_gets_what_the_dense_layer_gives(cluster):
    layer = ml.MoE(num_experts=4, d_ff=8, top_k=2)
    rng = np.random.default_rng(0)
    tokens = [rng.standard_normal((n, 6)).astype(np.float32) for n in (5, 1, 12)]
    params = layer.init(jax.random.key(0), tokens[0])
    flow = Dataflow(num_shards=2)
    source = flow.source(
        lambda shard, num_shards: (
            (epoch, rows[shard::num_shards]) for epoch, rows in enumerate(tokens)
        )
    )
    source.moe(layer, params).collect()

    got = cluster.run(flow).batches("out")

    for epoch, rows in enumerate(tokens):
        blocks = [block for time, block in got if time == epoch]
        dense, _ = layer.dense(params, rows)
        wanted = np.concatenate([dense[0::2], dense[1::2]])
        np.testing.assert_allclose(np.concatenate(blocks), wanted, atol=TOLERANCE)
