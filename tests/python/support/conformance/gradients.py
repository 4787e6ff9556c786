"""Gradients of the verbs, with Horovod's values (API.md 1.2.1).

The incoming gradient is rank + 1, unless a case says otherwise; its average is (size + 1) / 2.
"""

from __future__ import annotations

from typing import Any

import mpirun
import numpy as np

import hororing.numpy as hvd
from conformance.players import Player
from hororing import errors


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape)


def above() -> float:
    return hvd.rank() + 1.0


def above_all() -> list[float]:
    return [rank + 1.0 for rank in range(hvd.size())]


def first_column(gradient: np.ndarray[Any, Any]) -> list[float]:
    """Return the first column of a gradient whose columns are all equal."""
    assert (gradient == gradient[:, :1]).all()
    found: list[float] = gradient[:, 0].tolist()
    return found


def case_gradients_of_allreduce(player: Player) -> None:
    verbs = player.hvd
    for op, wanted in (
        (hvd.Average, np.mean(above_all())),
        (hvd.Sum, sum(above_all())),
        (hvd.Max, hvd.size()),  # for Min, Max and Product not the mathematical ones
        (hvd.Min, 1),
        (hvd.Product, np.prod(above_all())),
    ):
        (alone,) = player.gradients(lambda t, op=op: verbs.allreduce(t, op=op), above(), ones(3, 2))
        grouped = player.gradients(
            lambda t, u, op=op: verbs.grouped_allreduce([t, u], op=op), above(), ones(3, 2), ones()
        )
        for gradient, shape in zip([alone, *grouped], [(3, 2), (3, 2), ()], strict=True):
            assert gradient.shape == shape
            assert (gradient == wanted).all(), f"op {op}: {gradient}, not {wanted}"
    factors = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}
    (scaled,) = player.gradients(lambda t: verbs.allreduce(t, **factors), above(), ones(4))
    assert scaled.tolist() == [1.5 * sum(above_all())] * 4


def case_gradients_of_mixed_groups(player: Player) -> None:
    """Integers have no gradients; unused results have zero gradients."""
    size, rank = hvd.size(), hvd.rank()
    leaves = [np.ones(2, np.float32), np.ones(3, np.float16), ones(4), np.arange(5)]

    def used(results: Any) -> list[Any]:
        return [results[0], results[2]]

    found = player.gradients(
        lambda *t: used(player.hvd.grouped_allreduce(list(t), op=hvd.Sum)), [above(), 2.0], *leaves
    )
    assert found[0].tolist() == [sum(above_all())] * 2
    assert found[1] is None or found[1].tolist() == [0] * 3
    assert found[2].tolist() == [2 * size] * 4
    assert found[3] is None
    found = player.gradients(
        lambda *t: used(player.hvd.grouped_allgather(list(t))), [above(), 1.0], *leaves
    )
    assert found[0].tolist() == [(size + 1) / 2] * 2
    assert found[2].tolist() == [1] * 4
    found = player.gradients(
        lambda t, i, u: player.hvd.grouped_reducescatter([t, i, u], op=hvd.Sum),
        above(), ones(size + 1, 2), np.arange(size), ones(1),
    )  # fmt: skip
    assert first_column(found[0]) == [size, size, *(size * a for a in above_all()[1:])]
    assert found[1] is None
    assert found[2].tolist() == [size], rank


def case_gradients_of_allgather(player: Player) -> None:
    """Every row of the result has its own weight, and every rank its own number of rows."""
    size, rank = hvd.size(), hvd.rank()
    for rows in ([1] * size, [r + 2 for r in range(size)], [2 * r for r in range(size)]):
        weights = np.arange(sum(rows) * 3.0).reshape(-1, 3)
        (found,) = player.gradients(
            lambda t, w: player.hvd.allgather(t), [player.tensor(weights * above())],
            ones(rows[rank], 3), ones(0),
        )[:1]  # fmt: skip
        first = sum(rows[:rank])
        wanted = weights[first : first + rows[rank]] * (size + 1) / 2
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def case_gradients_of_broadcast(player: Player) -> None:
    size = hvd.size()
    for root in range(size):
        (found,) = player.gradients(
            lambda t, root=root: player.hvd.broadcast(t, root), above(), ones(4)
        )
        assert found.tolist() == [(size + 1) / 2 if hvd.rank() == root else 0] * 4


def case_gradients_of_alltoall(player: Player) -> None:
    """Each gradient returns to the source of its row; rows that were not sent get zeros."""
    rank, size = hvd.rank(), hvd.size()
    (found,) = player.gradients(player.hvd.alltoall, above(), ones(2 * size, 3))
    assert first_column(found) == np.repeat(above_all(), 2).tolist()
    plan = np.random.default_rng([mpirun.seed(), 5])
    for _ in range(3):
        splits = plan.integers(0, 4, (size, size))
        spare = plan.integers(0, 3, size)
        rows = int(splits[rank].sum() + spare[rank])
        received = int(splits[:, rank].sum())
        weights = np.arange(1.0, received + 1)[:, None] + 100 * rank + np.zeros((1, 2))
        mine = splits[rank].tolist()
        (found,) = player.gradients(
            lambda t, mine=mine: player.hvd.alltoall(t, splits=mine)[0],
            [player.tensor(weights)], ones(rows, 2),
        )  # fmt: skip
        wanted = [
            1.0 + splits[:rank, to].sum() + row + 100 * to
            for to in range(size)
            for row in range(splits[rank, to])
        ]
        assert found.shape == (rows, 2)
        assert first_column(found) == wanted + [0.0] * int(spare[rank])


def case_gradients_of_reducescatter(player: Player) -> None:
    verbs, size = player.hvd, hvd.size()
    for rows in (2 * size, 2 * size + 1, size - 1):
        parts = [rows // size + (r < rows % size) for r in range(size)]
        wanted = np.repeat(above_all(), parts)
        for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
            found = player.gradients(
                lambda t, op=op: [
                    verbs.reducescatter(t, op=op), verbs.grouped_reducescatter([t, t], op=op)[1]
                ],
                above(), ones(rows, 3),
            )  # fmt: skip
            assert first_column(found[0]) == (2 * factor * wanted).tolist()
    factors = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}
    (scaled,) = player.gradients(lambda t: verbs.reducescatter(t, **factors), above(), ones(size))
    assert scaled.tolist() == [1.5 * size * a for a in above_all()]


def case_gradients_in_process_sets(player: Player) -> None:
    rank, size = hvd.rank(), hvd.size()
    if size < 2:
        return
    verbs = player.hvd
    others = hvd.add_process_set(range(1, size))
    if others.included():
        members = size - 1
        above_members = above_all()[1:]
        mean, each_twice = float(np.mean(above_members)), np.repeat(above_members, 2).tolist()

        def found(verb: Any, **more: Any) -> list[float]:
            (gradient,) = player.gradients(
                lambda t: verb(t, process_set=others, **more), above(), ones(2 * members, 3)
            )
            return first_column(gradient)

        assert found(verbs.allreduce) == [mean] * 2 * members
        assert found(verbs.allreduce, op=hvd.Sum) == [sum(above_members)] * 2 * members
        assert found(verbs.allgather) == [mean] * 2 * members
        for root in range(1, size):
            sent = found(verbs.broadcast, root_rank=root)
            assert sent == [mean if rank == root else 0] * 2 * members
        assert found(verbs.alltoall) == each_twice
        assert found(verbs.reducescatter) == each_twice
        assert found(verbs.reducescatter, op=hvd.Sum) == [members * a for a in each_twice]
    assert hvd.remove_process_set(others)


def case_gradients_through_compression(player: Player) -> None:
    if not hasattr(player.hvd, "Compression"):
        return
    compression = player.hvd.Compression.fp16
    verbs, size = player.hvd, hvd.size()
    leaf = np.ones((size, 2), np.float32)
    for verb, wanted in (
        (verbs.allreduce, np.full(size, np.mean(above_all()))),
        (lambda t, **more: verbs.grouped_allreduce([t], **more), np.full(size, (size + 1) / 2)),
        (verbs.reducescatter, np.array(above_all())),
    ):
        (found,) = player.gradients(
            lambda t, verb=verb: verb(t, compression=compression), above(), leaf
        )
        assert found.dtype == np.float32
        assert first_column(found) == wanted.tolist()


def case_gradients_of_gradients(player: Player) -> None:
    size = hvd.size()

    def second(verb: Any, power: int) -> Any:
        """The gradient of the gradient of the sum of the result's power."""
        return lambda t: player.derivative(lambda u: verb(u) ** power, 1.0, [t])

    # Sum(2 total) over ranks, with total = size; then the same for ones.
    (found,) = player.gradients(
        second(lambda t: player.hvd.allreduce(t, op=hvd.Sum), 2), 1.0, ones(3)
    )
    assert found.tolist() == [2 * size * size] * 3
    mine = np.random.default_rng([mpirun.seed(), hvd.rank()]).normal(size=(2 * size, 2))
    splits = [2] * size

    def there_and_back(t: Any) -> Any:
        return player.hvd.alltoall(player.hvd.alltoall(t, splits=splits)[0], splits=splits)[0]

    (found,) = player.gradients(second(there_and_back, 3), 1.0, mine)
    np.testing.assert_allclose(found, 6 * mine)
    # An average's gradient is an allgather here, whose gradient is an average.
    (found,) = player.gradients(second(player.hvd.reducescatter, 2), 1.0, mine)
    np.testing.assert_allclose(found, 2, rtol=1e-14)


def case_a_mismatch_under_a_tape_is_one_error(player: Player) -> None:
    if hvd.size() == 1:
        return
    odd = hvd.rank() == hvd.size() - 1
    with player.refuses("allreduce", errors.MismatchError, "'differ'", "shapes"):
        player.gradients(
            lambda t: player.hvd.allreduce(t, name="differ"), 1.0, ones(3 if odd else 2)
        )
    (found,) = player.gradients(lambda t: player.hvd.allreduce(t, name="differ"), 1.0, ones(2))
    assert found.tolist() == [1, 1]
