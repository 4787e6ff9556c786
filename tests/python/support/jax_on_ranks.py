"""Tests on ranks with JAX; test_ranks_frameworks.py lets pytest run a copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import hororing.jax as hvd
import hororing.testing


@pytest.mark.ranks(2)
def test_verbs():
    total = hvd.allreduce(jnp.ones(3), op=hvd.Sum)
    assert total[0] == 2
    hororing.testing.assert_same(total)
    with pytest.raises(AssertionError, match="rank 1 has 1"):
        hororing.testing.assert_same(jnp.zeros(2) + hvd.rank())
    hvd.barrier()


@pytest.mark.ranks(2)
def test_verbs_within_jit():
    total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="x"))
    assert total(jnp.ones(3))[0] == 2
