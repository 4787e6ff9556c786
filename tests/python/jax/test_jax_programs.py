"""hororing.jax in compiled functions: names, loops, transformations, order and errors.

Eager calls pass the conformance suite; compiled ones must give the same bits.
"""

from __future__ import annotations

import doctest
import os
import re
import sys
import time
from pathlib import Path

import mpirun
import pytest
import session

if __name__ == "cases":  # on the ranks
    os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jax
    import numpy as np
    from jax import numpy as jnp

    import hororing.jax as hvd

    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()


def values(dtype, *shape):
    made = np.random.default_rng([RANK, *shape]).integers(-20, 20, shape)
    return jnp.asarray(np.abs(made) if dtype.startswith("u") else made).astype(dtype)


def same_bits(body, *arrays):
    """Compare a compiled function with the eager call; return its results."""
    eager, compiled = jax.tree.leaves(body(*arrays)), jax.tree.leaves(jax.jit(body)(*arrays))
    for one, other in zip(eager, compiled, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), (one, other)
    return compiled


DTYPES = ("float32", "bfloat16", "int32", "bool", "complex64", "uint8", "int8", "uint16", "int16",
          "int64", "float16", "float64", "complex128")  # fmt: skip


def case_compiled_and_eager_calls_give_the_same_bits():
    # Compiling takes most of this file's time: two ranks, in the push tier, try the first ones.
    for dtype in DTYPES[: 3 if SIZE == 2 else None]:
        tensor = values(dtype, 2 * SIZE, 3)
        ops = [hvd.Sum, *([hvd.Average] if dtype != "bool" else [])]
        ops += [] if dtype.startswith("complex") else [hvd.Min, hvd.Max, hvd.Product]

        def body(x, ops=ops):
            tree = {"x": x, "one": x[0, 0], "none": x[:0]}
            scattered = [hvd.reducescatter(x, op=op) for op in ops if op in (hvd.Sum, hvd.Average)]
            moved = [hvd.allgather(x), hvd.alltoall(x), hvd.broadcast(tree, SIZE - 1)]
            return [hvd.allreduce(tree, op=op) for op in ops], scattered, moved

        same_bits(body, tensor)
    x = values("float32", 8)
    if SIZE & (SIZE - 1) == 0:
        same_bits(lambda x: hvd.allreduce(x, op=hvd.Adasum), x)
    same_bits(lambda x: hvd.allreduce(x, prescale_factor=0.5, postscale_factor=3.0), x)
    same_bits(lambda x: hvd.allreduce(x, weight=RANK + 0.5), x)
    (mean,) = same_bits(lambda x, w: hvd.allreduce(x, weight=w), x, jnp.asarray(1.0 + RANK))
    total = sum(np.asarray(x) for x in hvd.allgather(x[None] * (1 + RANK)))
    np.testing.assert_allclose(mean, total / sum(range(1, SIZE + 1)), rtol=1e-6)
    floats = jnp.ones((4, 2)).astype(jnp.float8_e5m2) * (RANK + 1)
    same_bits(lambda x: (hvd.broadcast(x, 0), hvd.allgather(x)), floats)
    same_bits(lambda x: hvd.barrier(x + 1), x)


def case_sixty_independent_requests_in_any_order():
    """Their order is XLA's, and each rank has another one: what they depend on takes longer."""
    count = 60

    @jax.jit
    def program(tensors, slow):
        def late(x, at):
            return x if at % 6 else jax.lax.fori_loop(0, slow[at], lambda _, y: y * 1.0, x)

        return [hvd.allreduce(late(x, at) * (at + 1), op=hvd.Sum) for at, x in enumerate(tensors)]

    tensors = [jnp.full(10 + at, RANK + 1.0) for at in range(count)]
    for run in range(15):
        slow = np.random.default_rng([RANK, run]).integers(0, 2000, count)
        for at, result in enumerate(program(tensors, slow)):
            wanted = (at + 1) * sum(range(1, SIZE + 1))
            assert (np.asarray(result) == wanted).all(), (run, at)


def case_programs_that_run_ahead_keep_their_order():
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    results = [program(jnp.full(100, float(at))) for at in range(100)]  # none is waited for
    for at, result in enumerate(results):
        assert (np.asarray(result) == at * SIZE).all()


def case_loops_branches_and_rematerialisation():
    @jax.jit
    def scanned(x):
        def body(carry, at):
            beside = hvd.allreduce(jnp.ones(3) * at, op=hvd.Sum)  # not in the carry
            return hvd.allreduce(carry, op=hvd.Sum) / SIZE + 1, beside

        first = hvd.allreduce(x, op=hvd.Sum)  # its continuation is the whole loop
        return jax.lax.scan(body, first, jnp.arange(30.0), unroll=2)

    carry, beside = scanned(jnp.zeros(4))
    assert (carry == 30).all()
    assert (beside[:, 0] == SIZE * np.arange(30)).all()

    def halved(state):
        return state[0] + 1, hvd.allreduce(state[1]) * 0.5

    _, x = jax.jit(lambda x: jax.lax.while_loop(lambda s: s[0] < 9, halved, (0, x)))(jnp.ones(2))
    assert (x == 0.5**9).all()
    branch = jax.jit(lambda p, x: jax.lax.cond(p, hvd.allreduce, lambda x: x, x))
    assert (branch(True, jnp.full(2, float(RANK))) == (SIZE - 1) / 2).all()
    assert (branch(False, jnp.full(2, float(RANK))) == RANK).all()

    def block(x):
        return jnp.sin(hvd.allreduce(jnp.sin(x)))

    again = jax.checkpoint(block)
    x = jnp.arange(3.0)
    for call in (again, jax.jit(block), jax.jit(block, inline=True)):
        found = jax.jit(jax.grad(lambda x, call=call: call(call(x)).sum()))(x)
        wanted = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x)))).sum())(x)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def case_one_function_called_again_has_other_names():
    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    inner, again = jax.jit(total), jax.checkpoint(total)

    @jax.jit
    def program(x, matrix):
        results = []
        for at in range(1, 17):
            y = x * at
            if (at + RANK) % 2:  # other programs on other ranks, which XLA runs in another order
                for _ in range(3 + 5 * RANK):
                    matrix = jnp.tanh(matrix @ matrix)
                y = y + matrix[0, 0] * 0
            results.append((inner, again)[at // 8 % 2](y))
        return results

    x, matrix = jnp.ones(5), jnp.ones((60, 60)) * 0.01
    if RANK == 0:
        program.lower(x, matrix).compile()  # which gives its requests no other names
    for _ in range(20):
        for at, result in enumerate(program(x, matrix), 1):
            assert (np.asarray(result) == at * SIZE).all()
    scans = jax.jit(
        lambda x: [jax.lax.scan(lambda c, x: (c, total(x)), 0, x * k) for k in range(4)]
    )
    for at, (_, result) in enumerate(scans(jnp.ones((3, 2)))):
        assert (np.asarray(result) == at * SIZE).all()


def case_vmap_communicates_whole_batches():
    x = jnp.arange(12.0).reshape(2, 2, 3) + 100 * RANK
    if SIZE == 2:
        mapped = jax.vmap(lambda x: (hvd.allgather(x), hvd.reducescatter(x), hvd.alltoall(x)))
        alone = [jax.tree.leaves([f(each) for f in
                 (hvd.allgather, hvd.reducescatter, hvd.alltoall)]) for each in x]  # fmt: skip
        for way in (mapped, jax.jit(mapped)):
            for found, wanted in zip(way(x), zip(*alone, strict=True), strict=True):
                assert (found == jnp.stack(wanted)).all()
    last = jax.vmap(lambda x, y: hvd.allreduce([x, y]), in_axes=(2, None), out_axes=-1)
    found, _ = jax.jit(last)(x, x)
    assert (found == hvd.allreduce(x)).all()
    slopes = jax.vmap(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()))(x)
    assert (slopes == 2 * hvd.allreduce(hvd.allreduce(x, op=hvd.Sum), op=hvd.Sum)).all()
    with pytest.raises(NotImplementedError, match="a weight must not be mapped"):
        jax.vmap(lambda x, w: hvd.allreduce(x, weight=w))(x, x[:, 0, 0])


def case_gradients_of_compiled_functions():
    x = jnp.arange(2.0 * SIZE + 1) + RANK
    for body in (
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda x: hvd.allreduce(x, weight=RANK + 1.0),
        lambda x: hvd.broadcast(x, SIZE - 1),
        hvd.allgather,
        lambda x: hvd.reducescatter(x, op=hvd.Sum),  # unevenly
        lambda x: hvd.alltoall(x[1:]),
    ):
        same_bits(jax.grad(lambda x, body=body: (body(x) ** 2).sum()), x)


def case_a_mismatch_is_an_error_of_jax_with_our_text():
    program = jax.jit(hvd.allreduce)
    if SIZE > 1:
        for _ in range(2):
            with pytest.raises(Exception, match=r"shapes differ: rank 0: \[3\]; rank") as caught:
                jax.block_until_ready(program(jnp.ones(3 + RANK)))
            assert type(caught.value).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
            assert "jit_allreduce/case_a_mismatch" in str(caught.value)
        ragged = jax.jit(hvd.allgather)
        with pytest.raises(Exception, match="ranks pass equally many rows"):
            jax.block_until_ready(ragged(jnp.ones(3 + RANK)))
        if SIZE == 2:
            with pytest.raises(ValueError, match="splits=None for 2 ranks are not"):
                jax.jit(hvd.alltoall)(jnp.ones(3))
    assert (jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.ones(2)) == SIZE).all()


def case_two_calls_with_one_name_are_refused():
    def twice(x):
        one = hvd.allreduce(x, name="one")
        return one + hvd.allreduce(x * 2, name="one")

    with pytest.raises(ValueError, match="two calls in jit_twice have the name 'one': in twice at"):
        jax.jit(twice)(jnp.ones(2))
    repeated = jax.jit(lambda x: [hvd.allreduce(x * k, name="loop") for k in range(3)])
    assert [float(each[0]) for each in repeated(jnp.ones(2))] == [0, 1, 2]


def case_what_cannot_be_compiled_is_refused():
    with pytest.raises(ValueError, match="pass the value that is to wait"):
        jax.jit(lambda: hvd.barrier())()
    with pytest.raises(ValueError, match="arrays of uint32 cannot be reduced; cast it"):
        hvd.allreduce(jnp.ones(2, jnp.uint32))
    with pytest.raises(ValueError, match="arrays of float8_e5m2 cannot be reduced; cast it"):
        jax.jit(hvd.allreduce)(jnp.ones(2, jnp.float8_e5m2))
    with pytest.raises(ValueError, match="splits must be known while"):
        jax.jit(lambda x, s: hvd.alltoall(x, splits=s))(jnp.ones(2), jnp.ones(2, jnp.int32))


def case_no_thread_is_left_after_shutdown():
    def threads():
        names = []
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        return names.count("hororing-jax")

    big = jax.jit(lambda x: [hvd.allreduce(x * k) for k in range(20)])
    jax.block_until_ready(big(jnp.ones(1 << 15)))
    hvd.shutdown()
    deadline = time.monotonic() + 20  # they have left our code, and the kernel removes them
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 0
    hvd.init()
    jax.block_until_ready(big(jnp.ones(1 << 15)))


def case_the_blocks_of_the_page():
    pytest.importorskip("optax")
    pytest.importorskip("orbax.checkpoint")
    page = (Path(__file__).parents[3] / "docs/jax.md").read_text("utf-8")
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert names["after"] == 3
    assert (names["mean"] == 1).all()
    kernels = hvd.allgather(names["params"]["kernel"][None])
    assert (kernels == kernels[0]).all()


def case_examples_in_docstrings():
    import optax

    examples = [
        each
        for module in sorted(set(map(sys.modules.get, sys.modules)), key=str)
        if getattr(module, "__name__", "").startswith("hororing.jax.")
        for each in doctest.DocTestFinder(exclude_empty=True).find(module)
        if each.examples and "convert_error" not in each.name
    ]
    assert len(examples) > 10
    runner = doctest.DocTestRunner()
    names = {"hvd": hvd, "jax": jax, "jnp": jnp, "optax": optax}
    for each in examples if SIZE == 1 else ():
        each.globs = dict(names)
        runner.run(each)
    assert runner.failures == 0


def case_a_guard_names_the_leaf_that_differs():
    def tree(odd):
        kernel = np.ones((3, 4), np.float32)
        kernel[1, 2] += odd
        return {
            "layer": {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(4, jnp.bfloat16)},
            "count": 3,
            "key": jax.random.key(RANK),
        }

    same, last = tree(0), SIZE - 1
    for step in range(1, 5):
        assert hvd.guard(same, step, every=2) is same
    with pytest.raises(ValueError, match="outside of compiled functions"):
        jax.jit(lambda x: hvd.guard(x, 2))(jnp.ones(3))
    if SIZE == 1:
        return
    odd = tree(0.5 if last == RANK else 0)
    with pytest.raises(hvd.MismatchError, match=r"at step 6 \(last equal at 4\): \['layer'\]"):
        hvd.guard(odd, 6, every=2)
    found = []
    hvd.guard(odd, 8, every=2, on_divergence=found.append)
    assert found[0].at == [1, 2]
    assert found[0].largest == 0.5
    if SIZE > 2:
        repaired = hvd.guard(odd, 10, every=2, on_divergence="repair")
        assert repaired["layer"]["kernel"][1, 2] == 1
        assert repaired["layer"]["bias"].dtype == jnp.bfloat16
        hvd.guard(repaired, 12, every=2)


def case_a_guard_names_the_gradient_that_is_not_finite():
    optax = pytest.importorskip("optax")
    tx = hvd.DistributedOptimizer(optax.apply_if_finite(optax.sgd(0.1), 3))
    params = {"w": jnp.ones(3), "b": jnp.ones(5)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, scale):
        grads = {"w": params["w"] * scale, "b": params["b"]}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with pytest.raises(ValueError, match=r"optax\.apply_if_finite"):
        hvd.guard(params, 0, on_nonfinite="skip")
    hvd.guard(params, 0, on_nonfinite="error")
    for number in range(1, 4):
        scale = np.ones(3, np.float32)
        scale[1] = np.inf if number == 2 and RANK == SIZE - 1 else 1
        before = params
        params, state = step(params, state, scale)
        if number != 2 or SIZE == 1:
            hvd.guard((params, state), number, on_nonfinite="error")
            continue
        assert (params["b"] == before["b"]).all()  # optax has skipped it
        text = rf"\['w'\] is infinite on rank {SIZE - 1} \(.*at step 2: 1 of 3"
        with pytest.raises(FloatingPointError, match=text):
            hvd.guard((params, state), number, on_nonfinite="error")


test_case = session.on_ranks(globals(), 1, 2, 3, 4, push=[2], session="jax")


ENDS_EARLY = """
import jax, jax.numpy as jnp
import hororing.jax as hvd
hvd.init()
@jax.jit
def step(x):
    return hvd.allreduce(x @ x * 0.01)
x = jnp.ones((128, 128))
for _ in range(200):
    x = step(x)
if hvd.rank() == 0:
    print(x.sum())
"""


def test_a_script_may_end_before_its_programs_have(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS_EARLY)
    job = mpirun.run(script, 2)
    assert job.returncode == 0, job.report()
