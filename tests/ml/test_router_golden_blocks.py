"""Whole layers equal those of other projects: outputs, choices and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ml.moe_cases import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    OUTPUT_TOLERANCE,
    WEIGHT_TOLERANCE,
    assert_trees_close,
    flat,
    gated_params,
    load,
    shared_params,
    switch_params,
)
from timelyml.ml.choice import choose
from timelyml.ml.moe import (
    Capacity,
    Dropping,
    Groups,
    Router,
    TokenChoice,
    balance,
    grouped_sums,
    moe_dense,
    relu_expert_forward,
    router_sums,
    z_loss,
)

DEEPSEEK = TokenChoice(4, score="sigmoid", scale=2.5, groups=Groups(4, 2))


def pass_of(golden, params, router, **options):
    """Give output, what was routed, and gradients of `sum(out * cot)`."""
    rows, cotangent = flat(golden["x"]), flat(golden["cot"])

    def loss(params, rows):
        out, routed = moe_dense(params, rows, router, **options)
        return jnp.sum(out * cotangent), (out, routed)

    both = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (gradients, row_gradient), (out, routed) = both(params, rows)
    np.testing.assert_allclose(out, flat(golden["out"]), atol=OUTPUT_TOLERANCE)
    np.testing.assert_allclose(
        row_gradient, flat(golden["grad_x"]), atol=GRADIENT_TOLERANCE
    )
    return routed, gradients


def assert_same_choice(golden, routed):
    assert (np.asarray(routed.sums.counts) == golden["counts"]).all()
    assert (np.asarray(routed.choice.chosen) == golden["topk_idx"]).all()
    np.testing.assert_allclose(
        routed.weights, golden["topk_weight"], atol=WEIGHT_TOLERANCE
    )


@pytest.mark.parametrize(
    "name", ["mixtral_top2_E8", "mixtral_top1_E4", "mixtral_topE_E4"]
)
def test_mixtral_layers_agree(name):
    golden = load(name)
    router = Router(TokenChoice(golden["topk_idx"].shape[1]))
    routed, gradients = pass_of(golden, gated_params(golden), router)
    assert_same_choice(golden, routed)
    expected = gated_params(golden, "grad_")
    assert_trees_close(gradients, expected, GRADIENT_TOLERANCE)


@pytest.mark.parametrize(
    "name", ["mixtral_top2_E8", "mixtral_top1_E4", "mixtral_topE_E4"]
)
def test_mixtral_losses_agree_with_and_without_padding(name):
    golden = load(name)
    rule = TokenChoice(golden["topk_idx"].shape[1])
    logits = jnp.asarray(golden["logits"])

    def losses(logits, valid=None):
        sums = router_sums(logits, rule.decide(logits, valid=valid), rule, valid=valid)
        return balance(sums), z_loss(sums)

    aux, z = losses(logits)
    np.testing.assert_allclose(aux, golden["aux_loss"], rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(z, golden["z_loss"], rtol=LOSS_TOLERANCE)
    gradient = jax.grad(lambda logits: losses(logits)[0])(logits)
    np.testing.assert_allclose(
        gradient, golden["grad_logits_aux"], atol=GRADIENT_TOLERANCE
    )
    masked, _ = losses(logits, jnp.asarray(golden["aux_mask"]).reshape(-1) > 0)
    np.testing.assert_allclose(masked, golden["aux_loss_masked"], rtol=LOSS_TOLERANCE)


def test_one_renormalised_expert_leaves_the_router_without_a_gradient():
    golden = load("mixtral_top1_E4")
    params = gated_params(golden)
    _, frozen = pass_of(golden, params, Router(TokenChoice(1)))
    assert np.abs(frozen["router"]).max() == 0.0
    raw = Router(TokenChoice(1, renormalise=False))

    def loss(params):
        return jnp.sum(moe_dense(params, flat(golden["x"]), raw)[0])

    assert np.abs(jax.grad(loss)(params)["router"]).max() > 1e-2


@pytest.mark.parametrize("kind", ["norm", "nonorm"])
def test_qwen2_layers_with_a_gated_shared_expert_agree(kind):
    golden = load(f"qwen2_moe_shared_{kind}")

    def params_of(prefix):
        shared = shared_params(golden, "shared_expert", prefix)
        shared["gate"] = golden[f"{prefix}shared_expert_gate.weight"].T
        return {**gated_params(golden, prefix), "shared": shared}

    router = Router(TokenChoice(3, renormalise=kind == "norm"))
    routed, gradients = pass_of(golden, params_of("w_"), router)
    assert_same_choice(golden, routed)
    assert_trees_close(gradients, params_of("grad_"), GRADIENT_TOLERANCE)


def deepseek_params(golden, prefix="w_"):
    shared = shared_params(golden, "shared_experts", prefix)
    return {**gated_params(golden, prefix), "shared": shared}


def sorted_rows(chosen):
    return np.sort(np.asarray(chosen), axis=1)


def test_deepseek_layer_with_limited_groups_agrees():
    golden = load("dsv3_group_limited")
    bias = golden["buf_gate.e_score_correction_bias"]
    router = Router(DEEPSEEK)
    routed, gradients = pass_of(golden, deepseek_params(golden), router, bias=bias)
    # The file holds experts in ascending order, weights beside them.
    chosen = np.asarray(routed.choice.chosen)
    ascending = np.argsort(chosen, axis=1)
    assert (np.take_along_axis(chosen, ascending, 1) == golden["topk_idx"]).all()
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(routed.weights), ascending, 1),
        golden["topk_weight"],
        atol=WEIGHT_TOLERANCE,
    )
    assert (np.asarray(routed.sums.counts) == golden["counts"]).all()
    expected = deepseek_params(golden, "grad_")
    assert_trees_close(gradients, expected, GRADIENT_TOLERANCE)


def test_a_choice_without_groups_is_the_file_of_that_mistake():
    golden = load("dsv3_group_limited")
    bias, logits = golden["buf_gate.e_score_correction_bias"], golden["logits"]
    free = TokenChoice(4, score="sigmoid", scale=2.5)
    wrong = sorted_rows(free.decide(logits, bias=bias).chosen)
    right = sorted_rows(DEEPSEEK.decide(logits, bias=bias).chosen)
    assert (wrong == sorted_rows(golden["wrong_idx_no_groups"])).all()
    differing = (wrong != right).any(axis=1).sum()
    assert differing == golden["rows_differing_no_groups"]


def test_masked_groups_stay_masked_under_a_negative_bias():
    golden = load("dsv3_group_limited")
    bias, logits = golden["buf_gate.e_score_correction_bias"], golden["logits"]
    right = sorted_rows(DEEPSEEK.decide(logits, bias=bias).chosen)
    # A power of two below all scores, few enough bits that no rounding reorders.
    lowered = sorted_rows(DEEPSEEK.decide(logits, bias=bias - 4).chosen)
    assert (lowered == right).all()

    scores = jax.nn.sigmoid(jnp.asarray(logits)) + (bias - 4)
    masked = jnp.where(DEEPSEEK.groups.allowed(scores), scores, 0.0)
    wrong = sorted_rows(choose(masked, 4))
    assert (wrong != right).any(axis=1).all()
    assert (sorted_rows(golden["wrong_idx_mask_with_zero"]) == right).all()


@pytest.mark.parametrize("name", ["switch_cap3", "switch_cap64_nodrop"])
def test_switch_layers_drop_by_sequence_and_agree(name):
    golden = load(name)
    limit = Capacity(int(golden["capacity"]), "fixed")
    rule = TokenChoice(1, renormalise=False)
    router = Router(rule, Dropping(limit), num_groups=2)
    options = {"expert_fn": relu_expert_forward}
    routed, gradients = pass_of(golden, switch_params(golden), router, **options)

    dropped = ~np.asarray(routed.choice.kept).reshape(2, 16)
    assert (dropped == golden["dropped"]).all()
    assert int(routed.sums.dropped) == golden["dropped"].sum()
    assert int(routed.sums.emptied) == golden["dropped"].sum()
    chosen = np.asarray(routed.choice.chosen).reshape(2, 16)
    assert (chosen == golden["choice"]).all()
    out = np.asarray(moe_dense_output(golden, router, options))
    assert (out.reshape(2, 16, -1)[dropped] == 0).all()
    expected = switch_params(golden, "grad_")
    assert_trees_close(gradients, expected, GRADIENT_TOLERANCE)


def moe_dense_output(golden, router, options):
    return moe_dense(switch_params(golden), flat(golden["x"]), router, **options)[0]


def test_switch_losses_count_choices_before_the_drop():
    golden = load("switch_cap3")
    rule = TokenChoice(1, renormalise=False)
    router = Router(rule, Dropping(Capacity(3, "fixed")), num_groups=2)
    logits = flat(golden["logits"])
    choice = router.decide(logits)

    def losses(logits, choice=choice):
        sums = grouped_sums(logits, choice, rule, num_groups=2)
        return jnp.mean(jax.vmap(balance)(sums)), jnp.mean(jax.vmap(z_loss)(sums))

    aux, z = losses(logits)
    np.testing.assert_allclose(aux, golden["aux_loss"], rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(z, golden["z_loss"], rtol=LOSS_TOLERANCE)
    for index, key in enumerate(("grad_logits_aux", "grad_logits_z")):
        gradient = jax.grad(lambda logits, index=index: losses(logits)[index])(logits)
        np.testing.assert_allclose(gradient, flat(golden[key]), atol=GRADIENT_TOLERANCE)
    # That mistake reads the choice off the dispatch mask: a dropped token gets 0.
    read_off = jnp.asarray(golden["dispatch"].argmax(-1).reshape(-1, 1))
    after, _ = losses(logits, choice._replace(chosen=read_off))
    wrong = golden["wrong_aux_loss_post_drop"]
    np.testing.assert_allclose(after, wrong, rtol=LOSS_TOLERANCE)
    assert abs(float(aux) - wrong) > 0.1
