"""JAX, also inside of jit: hororun -np 2 python jax_script.py"""

import jax

import hororing.jax as hvd

hvd.init()
w = jax.numpy.zeros(8)


@jax.jit
def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ (w - 1)) ** 2).mean())(w)
    return w - 0.1 * hvd.allreduce(gradient, op=hvd.Average), loss


for number in range(200):
    x = jax.random.normal(jax.random.key(number * hvd.size() + hvd.rank()), (32, 8))
    w, loss = step(w, x)
print(f"rank {hvd.rank()} of {hvd.size()}: loss {loss:.6f}")
