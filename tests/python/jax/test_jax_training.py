"""Training with hororing.jax: optimizers, states, batch normalisation. Ranks equal one process."""

from __future__ import annotations

import os

import pytest
import session

if __name__ == "cases":  # on the ranks
    os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jax
    import numpy as np
    import optax
    from jax import numpy as jnp

    import hororing.jax as hvd

    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
    PARAMS = {"a": jnp.ones((3, 2)), "b": {"c": jnp.zeros(4), "d": jnp.zeros(())}}

pytest.importorskip("optax")
pytest.importorskip("flax")


def loss_of(params, x):
    return (params["a"] * x).sum() + (params["b"]["c"] * x * x).sum() + params["b"]["d"] * x


def trained(steps, inputs, weights=None, **options):
    """Return parameters after `steps` of SGD with rate 1; compiled and eager ones are equal."""
    found = []
    for compile_ in (jax.jit, lambda function: function):
        tx = hvd.DistributedOptimizer(optax.sgd(1.0), **options)

        def step(params, state, x, weight, tx=tx):
            gradients = jax.grad(loss_of)(params, x)
            updates, state = tx.update(gradients, state, params, weight=weight)
            return optax.apply_updates(params, updates), state

        params, state, step = PARAMS, tx.init(PARAMS), compile_(step)
        for at in range(steps):
            weight = None if weights is None else weights[at]
            params, state = step(params, state, inputs[at], weight)
        found.append(params)
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    return found[0]


def mean_of(values, weights=None):
    return float(np.average(values, weights=weights))


def case_an_optimizer_averages_sums_and_weighs():
    ranks = [rank + 1.0 for rank in range(SIZE)]
    mine = [RANK + 1.0]
    assert trained(1, mine)["b"]["d"] == pytest.approx(-mean_of(ranks))
    assert trained(1, mine, op=hvd.Sum)["b"]["d"] == pytest.approx(-sum(ranks))
    for options in (
        {"groups": 2}, {"groups": [["['b']"]]},
        {"groups": [["['a']", "['b']['d']"], ["['b']['c']"]]},
        {"gradient_predivide_factor": 2.0}, {"compression": hvd.Compression.bf16}
    ):  # fmt: skip
        found = trained(1, mine, **options)
        assert found["a"][0, 0] == pytest.approx(1 - mean_of(ranks), rel=0.01)
    weights = [rank + 0.5 for rank in range(SIZE)]
    found = trained(1, mine, weights=[jnp.asarray(RANK + 0.5)])
    assert found["b"]["d"] == pytest.approx(-mean_of(ranks, weights))


def case_several_passes_are_added_up():
    mine = [RANK + 1.0, 10.0 * (RANK + 1), 5.0]
    two = [rank + 1.0 + 10.0 * (rank + 1) for rank in range(SIZE)]
    found = trained(3, mine, backward_passes_per_step=2)  # the third waits for a fourth
    assert found["b"]["d"] == pytest.approx(-mean_of(two))
    found = trained(2, mine, backward_passes_per_step=2, average_aggregated_gradients=True)
    assert found["b"]["d"] == pytest.approx(-mean_of(two) / 2)
    weights = [RANK + 1.0, 2.0]
    all_inputs = [(r + 1) * f for r in range(SIZE) for f in (1.0, 10.0)]
    all_weights = [w for r in range(SIZE) for w in (r + 1.0, 2.0)]
    found = trained(2, mine, weights=weights, backward_passes_per_step=2)
    assert found["b"]["d"] == pytest.approx(-mean_of(all_inputs, all_weights))


def case_ranks_equal_one_process_with_the_whole_batch():
    """A small transformer, float32: losses agree to 1e-5."""
    import jax_transformer as model

    alone = model.losses(optax.adam(1e-2), lambda tokens: tokens)
    together = model.losses(
        hvd.DistributedOptimizer(optax.adam(1e-2)), lambda tokens: tokens[RANK::SIZE],
        hvd.metric_average,
    )  # fmt: skip
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert np.mean(together[-5:]) < np.mean(together[:5])


def case_reduced_gradients_without_optax():
    gradients = jax.jit(hvd.DistributedGrad(loss_of))(PARAMS, RANK + 1.0)
    assert gradients["b"]["d"] == pytest.approx((SIZE + 1) / 2)
    (value, extra), gradients = hvd.value_and_grad(
        lambda p, x: (loss_of(p, x), x), has_aux=True, op=hvd.Sum
    )(PARAMS, RANK + 1.0)
    assert extra == RANK + 1
    assert gradients["b"]["d"] == pytest.approx(sum(range(1, SIZE + 1)))
    assert value == loss_of(PARAMS, RANK + 1.0)


def case_states_are_sent():
    state = {
        "x": jnp.arange(3) + RANK, "key": jax.random.key(RANK), "rate": 0.5 * RANK,
        "name": f"of rank {RANK}", "wide": np.full(2, RANK), "none": None,
    }  # fmt: skip
    found = hvd.broadcast_parameters(state, root_rank=SIZE - 1)
    assert (found["x"] == jnp.arange(3) + SIZE - 1).all()
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(
        jax.random.key(SIZE - 1))).all()  # fmt: skip
    assert (found["rate"], found["name"]) == (0.5 * (SIZE - 1), f"of rank {SIZE - 1}")
    assert found["wide"].tolist() == [SIZE - 1] * 2
    opt_state = optax.adam(RANK + 1.0).init(PARAMS)
    sent = hvd.broadcast_optimizer_state(opt_state)
    assert jax.tree.structure(sent) == jax.tree.structure(opt_state)
    metrics = hvd.metric_average({"loss": float(RANK), "right": RANK == 0})
    assert metrics == {"loss": (SIZE - 1) / 2, "right": 1 / SIZE}


def case_wrong_arguments_of_an_optimizer():
    with pytest.raises(TypeError, match="takes a transformation of optax"):
        hvd.DistributedOptimizer(object())
    with pytest.raises(ValueError, match="must be at least 1"):
        hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=0)
    with pytest.raises(TypeError, match=r"or lists of paths such as .* not of int"):
        hvd.DistributedOptimizer(optax.sgd(1.0), groups=[[1]])
    if SIZE > 1:
        for groups, text in (
            ([["['b']['x']"]], r"groups\[0\]: no gradient is at .*; they are at \['a'\], \['b'\]"),
            ([["['b']"], ["['b']['c']"]], r"groups\[1\]: \['b'\]\['c'\] occurs in groups twice"),
        ):
            with pytest.raises(ValueError, match=text):
                trained(1, [1.0], groups=groups)


def case_batch_normalisation_equals_that_of_the_whole_batch():
    from flax import linen, nnx

    from hororing.jax.linen import SyncBatchNorm
    from hororing.jax.nnx import SyncBatchNorm as NnxSyncBatchNorm

    whole = jnp.asarray(np.random.default_rng(1).normal(2, 3, (6 * SIZE, 4, 5)))
    sizes = [6 + (1 if r == 0 else -1 if r == 1 else 0) for r in range(SIZE)]
    begin = sum(sizes[:RANK]) if SIZE > 1 else 0
    mine = slice(begin, begin + (sizes[RANK] if SIZE > 1 else 6))

    def results(norm, x):
        variables = norm.init(jax.random.key(0), x)

        def loss(x, scale):
            changed = {**variables, "params": {**variables["params"], "scale": scale}}
            y, updated = norm.apply(changed, x, mutable=["batch_stats"])
            return (jnp.sin(y) * y).sum(), (y, updated)

        scale = variables["params"]["scale"] * 1.5
        (_, (y, updated)), (slope, of_scale) = jax.jit(
            jax.value_and_grad(loss, (0, 1), has_aux=True)
        )(x, scale)
        return y, updated["batch_stats"], slope, of_scale

    y, stats, slope, of_scale = results(linen.BatchNorm(use_running_average=False), whole)
    found = results(SyncBatchNorm(use_running_average=False), whole[mine])
    np.testing.assert_allclose(found[0], y[mine], rtol=1e-5, atol=1e-6)
    for name in ("mean", "var"):
        np.testing.assert_allclose(found[1][name], stats[name], rtol=1e-5)
    np.testing.assert_allclose(found[2], slope[mine], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hvd.allreduce(found[3], op=hvd.Sum), of_scale, rtol=1e-5)

    one, all_ = nnx.BatchNorm(5, rngs=nnx.Rngs(0)), NnxSyncBatchNorm(5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(all_(whole[mine]), one(whole)[mine], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(all_.var[...], one.var[...], rtol=1e-5)
    running = all_(whole[mine], use_running_average=True)
    np.testing.assert_allclose(running, one(whole, use_running_average=True)[mine], rtol=1e-5)
    with pytest.raises(ValueError, match="axis_name='i' is for devices of one process"):
        NnxSyncBatchNorm(5, rngs=nnx.Rngs(0), axis_name="i")


test_case = session.on_ranks(globals(), 1, 2, 3, 4, push=[], session="jax")
