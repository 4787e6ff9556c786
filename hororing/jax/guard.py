"""guard: notices, between steps, that ranks have different trees. See docs/guard.md.

The half of `hororing.guard` that knows JAX's arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from hororing._adapters.replica_check import Digest, digest
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.guard import Finding, Watch
from hororing.guard.comparison import Bytes, Item
from hororing.guard.options import checked
from hororing.guard.sums import Sum, all_of
from hororing.guard.sums import watch as watch_sums
from hororing.jax._ffi.arrays import is_traced
from hororing.jax.gradients import members

T = TypeVar("T")
_watches: dict[tuple[str, int | None], Watch] = {}  # by name and process set


class _Leaves:
    """The leaves of a pytree: a `hororing.guard.watch.Source`."""

    remedy = "hvd.broadcast_parameters(tree, root_rank=0)"

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self.tree: Any = None
        self._excluded: dict[str, list[str]] = {}
        self._held: dict[str, np.ndarray[Any, Any]] = {}
        self.written: dict[str, np.ndarray[Any, Any]] = {}

    def begin(self) -> None:
        """Forget sums before this rank joined. The caller counts steps."""
        self.sums()

    def settle(self) -> None:
        """Do nothing: sums are looked at, not gradients."""

    def sums(self) -> Sequence[Sum]:
        """See `hororing.guard.watch.Source`."""
        number = self._process_set.process_set_id or 0
        return all_of(number, lambda request: members.get(request, [request]))

    def scale(self) -> None:
        """Return None: the scale of losses is not known."""

    def keep(self, finding: object) -> None:
        """Do nothing: there are no snapshots."""

    def replaced(self) -> Sequence[str]:
        """Return nothing: the caller has chosen the leaves."""
        return ()

    def excluded(self) -> Mapping[str, Sequence[str]]:
        """See `hororing.guard.watch.Source`."""
        return self._excluded

    def _arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        self._excluded = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.tree)[0]:
            name = jax.tree_util.keystr(path)
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                self._excluded.setdefault("sharded", []).append(name)
            elif isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                self._excluded.setdefault("random state", []).append(name)
            elif isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
                yield name, np.asarray(leaf)
            else:
                self._excluded.setdefault("no array", []).append(name)

    def items(self) -> Iterable[Item]:
        """See `hororing.guard.watch.Source`."""
        self._held, self.written = dict(self._arrays()), {}
        for name, array in self._held.items():
            found = Digest(name, f"{array.dtype}{[*array.shape]}", digest(array))
            yield Item.from_digest("parameter", found)

    def read(self, name: str) -> Bytes:
        """See `hororing.guard.watch.Source`."""
        return np.frombuffer(bytearray(self._held[name].tobytes()), np.uint8)

    def write(self, name: str, raw: Bytes) -> None:
        """See `hororing.guard.watch.Source`; the caller gets a new tree."""
        like = self._held[name]
        self.written[name] = raw.view(like.dtype).reshape(like.shape)

    def renewed(self) -> Any:
        """Return the tree with the leaves that were overwritten."""

        def of(path: Any, leaf: Any) -> Any:
            value = self.written.get(jax.tree_util.keystr(path))
            if value is None:
                return leaf
            return jnp.asarray(value) if isinstance(leaf, jax.Array) else type(leaf)(value)

        return jax.tree_util.tree_map_with_path(of, self.tree) if self.written else self.tree


def guard(
    tree: T,
    step: int,
    every: int = 100,
    on_divergence: str | Callable[[Finding], object] = "error",
    ignore: Iterable[str] = (),
    name: str = "tree",
    process_set: ProcessSet = global_process_set,
    on_nonfinite: str | None = "warn",
) -> T:
    """Compare a tree of all ranks after every `every` steps, and name the leaf that differs.

    Call it after each step, outside of compiled functions, on all ranks. It compares after the
    first step and after every `every` steps, which blocks: one number, a digest of the bits of all
    leaves. Only if it differs do ranks find out which leaf differs, on which rank, and by how much.
    Each time it also waits for `tree`, and ranks compare whether sums were not finite.

    Parameters
    ----------
    tree : pytree
        Arrays and numbers, such as ``(params, opt_state)``. Keys of jax.random and arrays that are
        spread over processes are not compared.
    step : int
        How many steps were taken: the same number on all ranks.
    every : int
        The number of steps from one comparison to the next; 0: none.
    on_divergence : str or function
        "error": MismatchError on all ranks. "warn": a warning in the log, again when other leaves
        differ. "repair": the result has the values of more than half of the ranks; MismatchError if
        there are none. A function: it is called on all ranks with a finding.
    ignore : iterable of str
        Patterns of paths that are not compared, such as ``"*batch_stats*"`` (`fnmatch`).
    name : str
        Distinguishes several trees of a training.
    process_set : ProcessSet
        The ranks that train together.
    on_nonfinite : str or None
        What happens if a gradient of some rank, or another array of floats that was summed since
        the call before, was infinite or NaN. "warn": a warning in the log names it. "error":
        FloatingPointError on all ranks. None: nobody looks, nor waits for the step.

    Returns
    -------
    pytree
        `tree`; with other leaves only if it was repaired.

    Raises
    ------
    ValueError
        In a compiled function, and for a wrong argument; on_nonfinite is "skip".

    Examples
    --------
    >>> params, opt_state = jnp.ones(3), jnp.zeros(3)
    >>> params, opt_state = hvd.guard((params, opt_state), step=100)
    """
    options = checked(
        "guard", every=every, on_divergence=on_divergence, ignore=ignore, on_nonfinite=on_nonfinite
    )
    if on_nonfinite == "skip":
        raise ValueError(
            'guard: on_nonfinite="skip" comes too late here, after the step; let optax skip it, '
            "by the reduced gradients, which are the same on all ranks: "
            "hvd.DistributedOptimizer(optax.apply_if_finite(tx, 10))"
        )
    if is_traced():
        raise ValueError("guard: call it outside of compiled functions, with the result of a step")
    key = name, process_set.process_set_id
    watch = _watches.get(key)
    if watch is None:
        watch = _watches[key] = Watch(f"jax.{name}", _Leaves(process_set), options, process_set)
        watch_sums(True)
    watch.options = options
    if on_nonfinite is not None:
        jax.block_until_ready(tree)
        watch.check_sums(step)
    if not watch.is_due(step):
        return tree
    leaves = watch.source
    assert isinstance(leaves, _Leaves)
    leaves.tree = tree
    try:
        watch.check(step)
        return leaves.renewed()  # type: ignore[no-any-return]
    finally:
        leaves.tree = None


__all__ = ["guard"]
