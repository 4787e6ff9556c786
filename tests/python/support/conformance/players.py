"""The adapters for the cases: NumPy arrays outside, the framework's tensors inside."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Body = Callable[..., Any]  # takes tensors, and returns lists and tuples of tensors


class Player:
    """The player of NumPy, and the base class of the others."""

    name = "numpy"
    module = "hororing.numpy"
    asynchronous = True  # has handles, and verbs that write into tensors
    differentiable = False
    traced = False  # bodies become graphs

    def __init__(self) -> None:
        self.hvd: Any = importlib.import_module(self.module)

    # -- tensors ------------------------------------------------------------------------------

    def tensor(self, array: Array) -> Any:
        """Return a new tensor."""
        return array.copy()

    def ones(self, *shape: int, dtype: str = "float32") -> Any:
        return self.tensor(np.ones(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))

    def strided(self, array: Array) -> Any:
        """Return a tensor that is every other element of a larger one."""
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return self.tensor(wide)[..., ::2]

    def array(self, tensor: Any) -> Array:
        """Return the array of a tensor; fail for other types."""
        assert isinstance(tensor, np.ndarray), type(tensor)
        return tensor

    def not_tensors(self) -> Iterator[tuple[Any, type[Exception], str]]:
        """Yield values that no verb takes, the exceptions, and parts of their texts."""
        for other in (1.5, [1.0, 2.0], "text", None, (np.ones(2),)):
            yield other, TypeError, type(other).__name__
        for dtype in ("complex64", "longdouble", "U3", "O", "datetime64[s]", "i4,f4"):
            yield np.zeros(2, dtype), ValueError, "not supported"
        yield np.ones(2, np.dtype(np.float32).newbyteorder()), ValueError, "non-native byte order"
        yield np.ma.masked_array(np.ones(2)), ValueError, "masked"

    def arrays(self, results: Any) -> Any:
        """Return the arrays of lists and tuples of tensors."""
        if isinstance(results, (list, tuple)):
            return [self.arrays(result) for result in results]
        return None if results is None else self.array(results)

    # -- bodies -------------------------------------------------------------------------------

    def run(self, body: Body, *inputs: Array) -> Any:
        """Return the results of `body`, which must not change its inputs."""
        tensors = [self.tensor(array) for array in inputs]
        results = self.arrays(self.called(body, *tensors))
        for tensor, before in zip(tensors, inputs, strict=True):
            assert self.array(tensor).tobytes() == before.tobytes()
        return results

    def called(self, body: Body, *tensors: Any) -> Any:
        """Call the body in this mode."""
        return body(*tensors)

    def join(self) -> int:
        return int(self.hvd.join())

    @contextlib.contextmanager
    def refuses(self, about: str, kind: Any, *texts: str) -> Iterator[None]:
        """Fail unless the block raises `kind`, with all texts in its message."""
        told, wrong = f"{self.name}, {about}: not refused", True
        try:
            yield
        except Exception as error:
            told = f"{self.name}, {about}: {type(error).__name__}: {error}"
            missing = [text for text in texts if text not in str(error)]
            wrong = bool(missing) or not isinstance(error, self.raised_for(kind))
        assert not wrong, f"{told}\nnot {kind} with {texts}"

    def raised_for(self, kind: Any) -> Any:
        """Return the type that this mode raises for hororing's exceptions of this kind."""
        return kind

    # -- gradients ----------------------------------------------------------------------------

    def derivative(self, body: Body, above: Any, leaves: Sequence[Any]) -> list[Any]:
        """Return the gradients of sum(results * above), as tensors. Call it within a body.

        `above` is a number for all results, or a list of numbers and tensors.
        """
        raise NotImplementedError

    def gradients(self, body: Body, above: Any, *leaves: Array) -> list[Array]:
        """Return the gradients as arrays; None for leaves without one."""
        return self.run(lambda *tensors: self.derivative(body, above, tensors), *leaves)


class Torch(Player):
    name = "torch"
    module = "hororing.torch"
    differentiable = True

    def __init__(self) -> None:
        super().__init__()
        self.torch = importlib.import_module("torch")

    def tensor(self, array: Array) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return self.tensor(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array.copy())

    def array(self, tensor: Any) -> Array:
        assert isinstance(tensor, self.torch.Tensor), type(tensor)
        tensor = tensor.detach()
        if tensor.dtype == self.torch.bfloat16:
            return tensor.contiguous().view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def not_tensors(self) -> Iterator[tuple[Any, type[Exception], str]]:
        for other in (1.5, [1.0, 2.0], "text", None, np.ones(2)):
            yield other, TypeError, type(other).__name__
        ones = self.ones(2)
        yield ones.to_sparse(), ValueError, "sparse"
        yield self.torch.eye(2).to_sparse_csr(), ValueError, "use tensor.to_dense()"
        yield ones.to("meta"), ValueError, "META"

    def derivative(self, body: Body, above: Any, leaves: Sequence[Any]) -> list[Any]:
        floats = [leaf for leaf in leaves if leaf.is_floating_point()]
        for leaf in floats:
            if leaf.is_leaf:
                leaf.requires_grad_()
        results = _list(body(*leaves))
        assert all(each.requires_grad == each.is_floating_point() for each in results)
        seeds = [
            self.torch.full_like(result, seed) if isinstance(seed, (int, float)) else seed
            for result, seed in _seeds(results, above)
        ]
        pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if r.is_floating_point()]
        found = iter(
            self.torch.autograd.grad(
                [result for result, _ in pairs], floats, [seed for _, seed in pairs],
                allow_unused=True, create_graph=True,
            )
        )  # fmt: skip
        return [next(found) if leaf.is_floating_point() else None for leaf in leaves]


def _list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _seeds(results: list[Any], above: Any) -> Any:
    seeds = above if isinstance(above, list) else [above] * len(results)
    return zip(results, seeds, strict=True)


class TensorFlow(Player):
    """In eager mode."""

    name = "tensorflow"
    module = "hororing.tensorflow"
    asynchronous = False
    differentiable = True

    def __init__(self) -> None:
        super().__init__()
        self.tf = importlib.import_module("tensorflow")
        # Even on one core, one thread can wait in a graph while another one submits.
        with contextlib.suppress(RuntimeError):  # TensorFlow is already running
            self.tf.config.threading.set_inter_op_parallelism_threads(2)

    def tensor(self, array: Array) -> Any:
        return self.tf.constant(array)

    def array(self, tensor: Any) -> Array:
        assert isinstance(tensor, self.tf.Tensor), type(tensor)
        return np.asarray(tensor.numpy())

    def not_tensors(self) -> Iterator[tuple[Any, type[Exception], str]]:
        for other in ("text", None):
            yield other, TypeError, type(other).__name__
        yield self.tf.constant(["text"]), ValueError, "string"
        yield self.tf.cast([1, 2], self.tf.qint8), ValueError, "qint8"
        yield self.tf.sparse.from_dense([1.0]), ValueError, "SparseTensor"
        yield self.tf.ragged.constant([[1.0], []]), ValueError, "RaggedTensor"

    def derivative(self, body: Body, above: Any, leaves: Sequence[Any]) -> list[Any]:
        tf = self.tf
        floats = [leaf for leaf in leaves if leaf.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            results = _list(body(*leaves))
        pairs = [
            (result, tf.zeros_like(result) + tf.cast(seed, result.dtype))
            for result, seed in _seeds(results, above)
            if result.dtype.is_floating
        ]
        found = iter(
            tape.gradient(
                [result for result, _ in pairs], floats, [seed for _, seed in pairs]
            )
        )  # fmt: skip
        return [next(found) if leaf.dtype.is_floating else None for leaf in leaves]


class Function(TensorFlow):
    """In tf.function: every body is traced once and run twice."""

    name = "function"
    traced = True

    def called(self, body: Body, *tensors: Any) -> Any:
        """Return the results of the second run, which must be equal to those of the first."""
        # Graphs cannot return None.
        kept: list[Any] = []

        def without_none(*tensors: Any) -> list[Any]:
            structure = self.tf.nest.flatten(results := body(*tensors))
            kept.append(results)
            return [tensor for tensor in structure if tensor is not None]

        function = self.tf.function(without_none, autograph=False)
        first, second = function(*tensors), function(*tensors)
        assert len(kept) == 1, "traced again"
        for one, other in zip(first, second, strict=True):
            assert self.array(one).tobytes() == self.array(other).tobytes()
        found = iter(second)
        return _mapped(lambda tensor: None if tensor is None else next(found), kept[0])

    def join(self) -> int:
        return int(self.tf.function(self.hvd.join)())

    def raised_for(self, kind: Any) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        return (*kinds, self.tf.errors.OpError)


class Jax(Player):
    """Eager; tests/python/jax compares compiled functions with it. Needs JAX_ENABLE_X64."""

    name = "jax"
    module = "hororing.jax"
    asynchronous = False
    differentiable = True

    def __init__(self) -> None:
        super().__init__()
        self.jax = importlib.import_module("jax")

    def tensor(self, array: Array) -> Any:
        return self.jax.numpy.array(array)  # a copy

    def array(self, tensor: Any) -> Array:
        assert isinstance(tensor, self.jax.Array), type(tensor)
        return np.asarray(tensor)

    def not_tensors(self) -> Iterator[tuple[Any, type[Exception], str]]:
        for other in ("text", np.array(["text"])):  # None is an empty pytree
            yield other, (TypeError, ValueError), ""
        yield self.ones(2).astype("int4"), ValueError, "array.astype(jnp.int8)"
        yield self.jax.random.key(0), ValueError, "jax.random.key_data"

    def derivative(self, body: Body, above: Any, leaves: Sequence[Any]) -> list[Any]:
        jnp = self.jax.numpy
        smooth = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

        def of_floats(floats: list[Any]) -> list[Any]:
            left = iter(floats)
            given = [
                next(left) if each else leaf for each, leaf in zip(smooth, leaves, strict=True)
            ]
            results = _list(body(*given))
            return [each for each in results if jnp.issubdtype(each.dtype, jnp.inexact)]

        floats = [leaf for each, leaf in zip(smooth, leaves, strict=True) if each]
        results, pull_back = self.jax.vjp(of_floats, floats)
        seeds = above if isinstance(above, list) else [above] * len(results)
        (found,) = pull_back([jnp.zeros_like(r) + jnp.asarray(s, r.dtype)
                              for r, s in zip(results, seeds, strict=True)])  # fmt: skip
        left = iter(found)
        return [next(left) if each else None for each in smooth]


def _mapped(function: Callable[[Any], Any], results: Any) -> Any:
    if isinstance(results, (list, tuple)):
        return [_mapped(function, result) for result in results]
    return function(results)


PLAYERS = {player.name: player for player in (Player, Torch, TensorFlow, Function, Jax)}


@functools.cache
def player_of(name: str) -> Player:
    return PLAYERS[name]()
