"""Reducing the gradients of one step, for tapes and optimizers.

All gradients of a call are one `carry_out`: in a graph each is sent as soon as it is computed, and
one operation waits for all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from hororing._adapters.optimizer_options import Reduction, checked_reduction
from hororing._requests import arguments
from hororing._requests.arguments import OF_A_LAYER, Average, Sum
from hororing._requests.handles import ALLGATHER, ALLREDUCE
from hororing._requests.names import without_numbers
from hororing._requests.process_sets import ProcessSet
from hororing.tensorflow._tensor.names import in_graph
from hororing.tensorflow._tensor.requests import Request, carry_out
from hororing.tensorflow._tensor.tensors import checked_weight
from hororing.tensorflow.verbs import averaged_slices

# A gradient: a tensor, slices of one, or None.
Gradient = Any

# A TensorFlow operation costs about as much as reducing ten KiB, so adjacent small gradients share
# one. Ranks agree, because that depends only on shapes.
_SMALL_BYTES: Final = 64 * 2**10
_BUNDLE_BYTES: Final = 256 * 2**10
_BUNDLE_COUNT: Final = 32


def checked_options(what: str, **arguments: Any) -> Reduction:
    """Make a reduction of a user's arguments; groups in lists become lists of `variable_key`."""
    options = checked_reduction(what, **arguments)
    if isinstance(options.groups, int):
        return options
    return dataclasses.replace(options, groups=keyed_groups(options.groups, what))


def keyed_groups(groups: Iterable[Iterable[Any]], what: str) -> tuple[tuple[Any, ...], ...]:
    """Return lists of variables as lists of `variable_key`. ValueError if one occurs twice."""
    keys = tuple(tuple(checked_key(each, f"{what}: groups") for each in group) for group in groups)
    repeated = Counter(key for group in keys for key in group)
    if any(count > 1 for count in repeated.values()):
        raise ValueError(f"{what}: a variable is in groups more than once")
    return keys


def variable_key(variable: Any) -> Any:
    """Return an identity that a Keras variable shares with the TensorFlow variable inside it.

    Names would not do: in Keras 3 every layer has a "kernel".
    """
    inner = getattr(variable, "value", None)
    inner = variable if inner is None or callable(inner) else inner
    return inner.ref() if hasattr(inner, "ref") else id(inner)


def checked_key(variable: Any, what: str) -> Any:
    """Return the `variable_key` of a user's argument. TypeError unless it is TensorFlow's."""
    key = variable_key(variable)
    if isinstance(key, int):
        raise TypeError(f"{what} takes variables, not {type(variable).__name__}; {OF_A_LAYER}")
    return key


def variable_name(variable: Any) -> str:
    """Return a name for a variable, or another source of gradients; it need not be unique."""
    name = getattr(variable, "path", None)
    if not isinstance(name, str):
        try:
            name = variable.name
        except AttributeError:  # eager tensors have none
            name = "source"
    return str(name).partition(":")[0]


def unique_names(prefix: str, sources: Iterable[Any]) -> list[str]:
    """Names of requests for `sources`, in their order, equal on all ranks that have the same."""
    seen: Counter[str] = Counter()
    names: dict[str, None] = {}
    for source in sources:
        plain = name = without_numbers(variable_name(source))
        while name in names:  # perhaps of a variable that is named like this
            seen[plain] += 1
            name = f"{plain}.{seen[plain] + 1}"
        names[name] = None
    return [f"{prefix}/{name}" for name in names]


def step_prefix(what: str, process_set: ProcessSet) -> str:
    """A prefix for the names of one call's requests: of the graph that is built, or `what`."""
    return what if tf.executing_eagerly() else in_graph(what, process_set.process_set_id)


def reduce_gradients(
    gradients: Sequence[Gradient],
    names: Sequence[str],
    options: Reduction,
    *,
    keys: Sequence[Any] = (),
    local: Collection[Any] = (),
    weight: Any = None,
) -> list[Gradient]:
    """Return the gradients reduced over the ranks of the process set.

    Parameters
    ----------
    gradients : sequence of Gradient
        Tensors, tf.IndexedSlices, or None, which stays None: ranks must agree on which.
    names : sequence of str
        Of the requests, one per gradient.
    keys : sequence, optional
        `variable_key` of each gradient's variable, for groups given as lists and for `local`.
    local : sequence, optional
        Keys of variables whose gradients are not reduced, but divided by the number of ranks if
        `scale_local` is set: then they weigh as much as averaged ones.
    weight : float or callable, optional
        The weight of this rank's other gradients, a number or a tensor of one element. None:
        equal weights.
    """
    results = [
        _checked_sparse(each, name, options) if isinstance(each, tf.IndexedSlices) else each
        for each, name in zip(gradients, names, strict=True)
    ]
    weight = checked_weight(weight, "gradients")
    alone = weight is not None and options.process_set.included()  # weight 0 is for one rank, too
    if not options.reduces and not alone:
        return results
    plan = _Plan(options, weight)
    for at, gradient in enumerate(results):
        if gradient is None:
            continue
        if keys and keys[at] in local:
            results[at] = _local(gradient, options)
        elif isinstance(gradient, tf.IndexedSlices):
            plan.add_sparse(at, gradient, names[at])
        else:
            plan.add_dense(at, gradient, names[at], keys[at] if keys else at)
    plan.carry_out(results)
    return results


def _checked_sparse(slices: tf.IndexedSlices, name: str, options: Reduction) -> Gradient:
    if options.sparse_as_dense:
        return tf.convert_to_tensor(slices)
    if options.op not in (Average, Sum):
        raise NotImplementedError(
            f"'{name}': op={arguments.op_name(options.op)} is not defined for sparse gradients "
            "(tf.IndexedSlices); use sparse_as_dense=True, or op=Average"
        )
    return slices


def _local(gradient: Gradient, options: Reduction) -> Gradient:
    if not options.scale_local:
        return gradient
    ranks = len(options.process_set.ranks)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / ranks, gradient.indices, gradient.dense_shape)
    return gradient / ranks


class _Dense(NamedTuple):
    at: int
    tensor: tf.Tensor  # compressed
    context: Any
    name: str
    key: Any


class _Sparse(NamedTuple):
    at: int
    slices: tf.IndexedSlices
    values: tf.Tensor  # compressed
    context: Any
    name: str


class _Plan:
    """The requests of a step's gradients, and the places of their results."""

    def __init__(self, options: Reduction, weight: tf.Tensor | None) -> None:
        self.options = options
        self.weight = weight
        self.dense: list[_Dense] = []
        self.sparse: list[_Sparse] = []

    def add_dense(self, at: int, tensor: tf.Tensor, name: str, key: Any) -> None:
        self.dense.append(_Dense(at, *self.options.compression.compress(tensor), name, key))

    def add_sparse(self, at: int, slices: tf.IndexedSlices, name: str) -> None:
        values = slices.values
        if self.weight is not None:
            values = tf.where(self.weight[0] > 0, values, tf.zeros_like(values))
        compressed = self.options.compression.compress(values)
        self.sparse.append(_Sparse(at, slices, *compressed, name))

    def carry_out(self, results: list[Gradient]) -> None:
        """Reduce everything and put it into `results`."""
        options = self.options
        groups = self._grouped()
        requests = [
            Request(
                ALLREDUCE,
                ",".join(each.name for each in group),
                [each.tensor for each in group],
                options.process_set,
                options.op,
                options.factors,
                weight=self.weight,
            )
            for group in groups
        ]
        requests += [
            Request(
                ALLGATHER,
                each.name,
                [each.values, each.slices.indices, *self._shares(each)],
                options.process_set,
            )
            for each in self.sparse
        ]
        if not requests:
            return
        answers = carry_out(requests)
        for group, tensors in zip(groups, answers, strict=False):
            for each, tensor in zip(group, tensors, strict=True):
                results[each.at] = options.compression.decompress(tensor, each.context)
        for sparse, answer in zip(self.sparse, answers[len(groups) :], strict=True):
            values, indices, *weights = answer
            values = options.compression.decompress(values, sparse.context)
            op = options.op
            if weights:
                each, rows = weights
                share = tf.repeat(tf.math.divide_no_nan(each, tf.reduce_sum(each)), rows)
                ones = tf.ones([tf.rank(values) - 1], tf.int32)
                share = tf.reshape(share, tf.concat([[-1], ones], 0))
                values, op = values * tf.cast(share, values.dtype), Sum
            results[sparse.at] = averaged_slices(
                values, indices, sparse.slices, op, options.process_set
            )

    def _shares(self, each: _Sparse) -> list[tf.Tensor]:
        """Weight and number of rows of this rank; values times weights may exceed 16-bit floats."""
        rows = tf.shape(each.values, tf.int64)[:1]
        return [] if self.weight is None else [self.weight, rows]

    def _grouped(self) -> list[list[_Dense]]:
        """Dense gradients that are sent together, in order."""
        groups = self.options.groups
        if not groups:
            return _bundled(self.dense)
        if isinstance(groups, int):
            count = len(self.dense)
            bounds = [count * number // groups for number in range(groups + 1)]
            parts = [self.dense[begin:end] for begin, end in itertools.pairwise(bounds)]
            return [part for part in parts if part]
        group_of = {key: number for number, group in enumerate(groups) for key in group}
        members: dict[Any, list[_Dense]] = {}
        for each in self.dense:
            members.setdefault(group_of.get(each.key, ("alone", each.at)), []).append(each)
        return list(members.values())


def _bundled(gradients: Sequence[_Dense]) -> list[list[_Dense]]:
    """Join small neighbours, from the last one on: backward computes them in that order."""
    bundles: list[list[_Dense]] = []
    room = 0
    for each in reversed(gradients):
        count = each.tensor.shape.num_elements()
        size = _BUNDLE_BYTES if count is None else count * each.tensor.dtype.size
        if size > _SMALL_BYTES:
            bundles.append([each])
            room = 0
        elif bundles and size <= room and len(bundles[-1]) < _BUNDLE_COUNT:
            bundles[-1].append(each)
            room -= size
        else:
            bundles.append([each])
            room = _BUNDLE_BYTES - size
    return bundles
