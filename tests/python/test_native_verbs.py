"""Verbs whose usual calls are native: like functions to all who look, and alike in what they do."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import pydoc
import time
import weakref
from typing import Any

import mpirun
import numpy as np
import pytest
import torch

import hororing.numpy
import hororing.torch as hvd
from hororing import names
from hororing._tensors import Verb
from hororing.process_sets import ProcessSet
from hororing.verbs import Verbs

TORCH = {
    name: getattr(hvd, name)
    for name in (
        "allreduce", "allreduce_", "allreduce_async_", "grouped_allreduce_",
        "grouped_allreduce_async_", "broadcast_", "broadcast_async_", "poll", "synchronize",
    )
}  # fmt: skip
VERBS = [*TORCH.values(), *(getattr(hororing.numpy, name) for name in TORCH)]


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_a_verb_looks_like_the_function_that_it_is_made_of(verb: Any):
    function = verb.__wrapped__
    assert isinstance(verb, Verb)
    assert callable(verb)
    assert inspect.isroutine(verb)
    assert inspect.signature(verb) == inspect.signature(function)
    assert verb.__doc__ in (function.__doc__, getattr(Verbs, verb.__name__, function).__doc__)
    assert verb.__name__ == verb.__qualname__ == function.__name__
    assert verb.__annotations__ == function.__annotations__
    assert repr(verb).startswith(f"<function {verb.__name__} at 0x")
    assert verb.__doc__.splitlines()[0] in pydoc.render_doc(verb)


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_a_verb_is_pickled_and_copied_as_the_global_that_it_is(verb: Any):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(verb, protocol)) is verb
    assert copy.copy(verb) is verb
    assert copy.deepcopy([verb])[0] is verb


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_a_verb_is_an_object_as_functions_are(verb: Any):
    assert weakref.ref(verb)() is verb
    assert {verb: 1}[verb] == 1
    assert verb == verb
    assert verb != VERBS
    verb.note = "mine"
    assert verb.__dict__["note"] == "mine"
    del verb.note
    assert not hasattr(verb, "note")


def test_a_verb_in_a_class_is_a_method_of_its_objects():
    class Owner:
        reduce = hvd.allreduce_
        plain = staticmethod(hvd.allreduce_)

    owner = Owner()
    assert Owner.reduce is hvd.allreduce_ is owner.plain
    assert inspect.ismethod(owner.reduce)
    assert owner.reduce.__self__ is owner
    assert owner.reduce.__func__ is hvd.allreduce_


def test_a_verb_that_nobody_has_is_freed():
    def allreduce_(tensor: object, name: object = None) -> None: ...

    from hororing.torch.verbs import adapter

    verb = Verb(
        "allreduce_", allreduce_, (("tensor", None), ("name", None)), adapter.plain_tensors,
        print, {}, ("allreduce", 0),
    )  # fmt: skip
    verb.itself = verb  # type: ignore[attr-defined]
    freed = weakref.ref(verb)
    del verb
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("shout", print, (("tensor", None),)), "there is no verb shout"),
        (("poll", print, ()), "1 to 12 parameters"),
        (("poll", print, (("a", None),) * 13), "1 to 12 parameters"),
    ],
)
def test_what_cannot_be_a_verb_is_refused(arguments: tuple[Any, ...], error: str):
    from hororing.torch.verbs import adapter

    with pytest.raises(ValueError, match=error):
        Verb(*arguments, adapter.plain_tensors, print, {}, ("poll", 0))
    with pytest.raises(ValueError, match="of such tensors"):
        Verb("poll", print, (("handle", None),), object(), print, {}, ())  # type: ignore[arg-type]


class Given:
    """A verb over a function that tells what it was given; nothing gets as far as the core."""

    def __init__(self, kind: str) -> None:
        from hororing.torch.verbs import adapter

        verb = TORCH[kind]
        parameters = tuple((p.name, p.default) for p in inspect.signature(verb).parameters.values())
        self.counters: dict[tuple[str, int], int] = {}
        self.verb = Verb(
            kind, self.record, parameters, adapter.plain_tensors, print, self.counters,
            (kind, 0),
        )  # fmt: skip

    def record(self, *args: Any, **named: Any) -> Any:
        return args, named


class Text(str):
    __slots__ = ()


PLAIN = torch.ones(2)
UNUSUAL: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    (kind, args, named)
    for kind in ("allreduce", "allreduce_", "allreduce_async_")
    for args, named in [
        ((), {}),
        ((), {"name": "a"}),
        ((PLAIN,) * 9, {}),
        ((PLAIN,), {"tensor": PLAIN}),
        ((PLAIN,), {"title": "a"}),
        ((PLAIN, True, "a"), {}),
        ((PLAIN,), {"average": False, "name": "a"}),
        ((PLAIN, None, 5), {}),
        ((PLAIN,), {"name": Text("a")}),
        ((PLAIN,), {"name": "a\0b"}),
        ((PLAIN,), {"name": "a", "op": 99}),
        ((PLAIN,), {"name": "a", "op": hvd.Adasum}),
        ((PLAIN,), {"name": "a", "prescale_factor": 1}),
        ((PLAIN,), {"name": "a", "postscale_factor": None}),
        ((PLAIN,), {"name": "a", "process_set": ProcessSet([0])}),
        ((PLAIN,), {"name": "a", "process_set": None}),
        ((PLAIN.to_sparse(),), {"name": "a"}),
        ((torch._neg_view(PLAIN),), {"name": "a"}),
        ((torch.zeros(2, dtype=torch.complex64),), {"name": "a"}),
        ((torch.ones(2, 2).t(),), {"name": "a"}),
        ((np.ones(2),), {"name": "a"}),
        ((None,), {"name": "a"}),
    ]
] + [
    ("allreduce", (PLAIN,), {"compression": hvd.Compression.fp16}),
    ("allreduce", (torch.ones(2, requires_grad=True),), {"name": "a"}),
    ("grouped_allreduce_async_", ([],), {"name": "a"}),
    ("grouped_allreduce_async_", (iter([PLAIN]),), {"name": "a"}),
    ("grouped_allreduce_", ([PLAIN, PLAIN.to_sparse()],), {"name": "a"}),
    ("broadcast_", (PLAIN,), {"name": "a"}),
    ("broadcast_", (PLAIN, 1.0), {"name": "a"}),
    ("broadcast_", (PLAIN, True), {"name": "a"}),
    ("broadcast_async_", (PLAIN, 1 << 40), {"name": "a"}),
    ("synchronize", (), {}),
    ("synchronize", (77,), {}),
    ("synchronize", ("x",), {}),
    ("poll", (77,), {}),
    ("poll", (True,), {}),
    ("poll", (1, 2), {}),
]


@pytest.mark.parametrize(("kind", "args", "named"), UNUSUAL, ids=str)
def test_unusual_calls_are_the_functions_with_the_same_arguments(
    kind: str, args: tuple[Any, ...], named: dict[str, Any]
):
    given = Given(kind)
    positional, keywords = given.verb(*args, **named)
    assert len(positional) == len(args)
    assert all(a is b for a, b in zip(positional, args, strict=True))
    assert list(keywords) == list(named)
    assert all(keywords[key] is named[key] for key in named)
    assert not given.counters


def test_keywords_that_are_equal_but_not_the_same_are_understood():
    given = Given("allreduce_")
    assert given.verb(**{"".join(["ten", "sor"]): PLAIN, "".join(["na", "me"]): "a"})[0] == ()


def test_what_the_core_refuses_is_the_functions_and_is_not_counted():
    given = Given("allreduce_")
    assert given.verb(PLAIN) == ((PLAIN,), {})  # there is no engine
    assert given.verb.__call__(PLAIN, name="a") == ((PLAIN,), {"name": "a"})
    assert not given.counters


@pytest.mark.parametrize("handle", [[], "1", 0, -1, 2**70, 1.5, None])
def test_what_is_no_handle_is_an_unknown_one(handle: object):
    for verb in (hvd.synchronize, hororing.numpy.synchronize, hvd.poll, hororing.numpy.poll):
        with pytest.raises(ValueError, match="there is no handle"):
            verb(handle)


@pytest.mark.parametrize("name", ["allreduce", "allreduce_", "broadcast_", "synchronize", "poll"])
def test_wrong_calls_are_the_errors_of_the_function(name: str):
    for verb in (TORCH[name], getattr(hororing.numpy, name)):
        first = next(iter(inspect.signature(verb).parameters))
        for args, named, text in [
            ((), {}, rf"{name}\(\) missing .* '{first}'"),
            ((PLAIN,), {"nonsense": 1}, rf"{name}\(\) got an unexpected keyword .* 'nonsense'"),
            ((PLAIN,), {first: PLAIN}, rf"{name}\(\) got multiple values for argument '{first}'"),
            ((PLAIN,) * 10, {}, rf"{name}\(\) takes .* 1[01] were given"),
        ]:
            with pytest.raises(TypeError, match=text):
                verb(*args, **named)


# ---------------------------------------------------------------------------------------------
# With other ranks


def case_init() -> None:
    hvd.init()


def case_no_frame_is_entered_by_usual_calls() -> None:
    import sys

    entered: list[str] = []
    tensor, pair = torch.ones(3), [torch.ones(2), torch.ones(1)]
    for turn in range(2):
        sys.setprofile(
            lambda frame, event, _: entered.append(frame.f_code.co_name)
            if event == "call" and "hororing" in frame.f_code.co_filename
            and frame.f_code.co_filename != __file__
            else None
        )  # fmt: skip
        try:
            hvd.synchronize(hvd.allreduce_async_(tensor, name="n", op=hvd.Sum))
            hvd.allreduce_(tensor, None, "n")
            hvd.allreduce(tensor, name="n")
            hvd.allreduce_(tensor)
            hvd.allreduce(tensor)
            hvd.synchronize(hvd.grouped_allreduce_async_(pair, name="g"))
            hvd.grouped_allreduce_(pair)
            hvd.synchronize(hvd.broadcast_async_(tensor, 0, name="b"))
            hvd.broadcast_(tensor, root_rank=0)
            handle = hvd.allreduce_async_(tensor, name="p")
            while not hvd.poll(handle):
                pass
            hvd.synchronize(handle)
        finally:
            sys.setprofile(None)
        assert entered == [], turn


def case_results_are_those_of_the_function() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    for verb in (hvd.allreduce_, hvd.allreduce_.__wrapped__):  # type: ignore[attr-defined]
        tensor = torch.full((2, 3), rank + 1.0)
        before = tensor._version
        assert verb(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5) is tensor
        assert tensor.tolist() == [[total] * 3] * 2
        assert tensor._version > before
    for verb in (hvd.allreduce, hvd.allreduce.__wrapped__):  # type: ignore[attr-defined]
        tensor = torch.nn.Parameter(torch.full((2,), rank + 1.0), requires_grad=False)
        result = verb(tensor, op=hvd.Max, name="max")
        assert type(result) is torch.Tensor
        assert result.tolist() == [size] * 2
        assert tensor.tolist() == [rank + 1.0] * 2
        assert not result.requires_grad
    tensors = [torch.full((2,), rank + 1.0), torch.full((), rank, dtype=torch.int64)]
    result = hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Sum))
    assert type(result) is tuple
    assert result[0] is tensors[0]
    assert result[1] is tensors[1]
    assert tensors[0].tolist() == [total] * 2
    assert int(tensors[1]) == total - size
    array = np.full((3,), rank + 1.0, np.float32)
    assert hororing.numpy.broadcast_(array, size - 1) is array
    assert array.tolist() == [size] * 3
    fresh = hororing.numpy.allreduce(array)
    assert fresh is not array
    assert fresh.tolist() == [size] * 3


def case_unnamed_calls_are_counted_together_whoever_makes_them() -> None:
    names.restart_default_names()
    tensor = torch.ones(1)
    hvd.allreduce_(tensor)
    hvd.allreduce_.__wrapped__(tensor)  # type: ignore[attr-defined]
    handle = hvd.allreduce_async_(tensor)
    assert names.counts == {("allreduce", 0): 3}
    with pytest.raises(ValueError, match="no reduce operation"):
        hvd.allreduce_(tensor, op=99)
    hvd.synchronize(handle)
    hvd.grouped_allreduce_([tensor])
    hvd.broadcast_(tensor, 0)
    assert names.counts == {
        ("allreduce", 0): 3, ("grouped_allreduce", 0): 1, ("broadcast", 0): 1
    }  # fmt: skip


def case_a_write_is_seen_by_autograd() -> None:
    weight = torch.ones(2, requires_grad=True)
    for write in (
        lambda t: hvd.allreduce_(t),
        lambda t: hvd.synchronize(hvd.allreduce_async_(t)),
        lambda t: hvd.grouped_allreduce_([t]),
        lambda t: hvd.broadcast_(t, 0),
    ):
        saved = torch.ones(2)
        product = (weight * saved).sum()
        write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def case_writes_are_told_before_a_result_is_given_back() -> None:
    tensors = [torch.ones(1) for _ in range(150)]
    handles = [hvd.allreduce_async_(t, name=f"told {i}") for i, t in enumerate(tensors)]
    assert hvd.synchronize(handles[0]) is tensors[0]
    assert {tensor._version for tensor in tensors} == {1}
    for handle in handles[1:]:
        hvd.synchronize(handle)
    assert {tensor._version for tensor in tensors} == {1}
    handle = hvd.broadcast_async_(tensors[0], 0, name="told")
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert tensors[0]._version == 2
    hvd.synchronize(handle)
    assert tensors[0]._version == 2


def case_tensors_of_inference_mode_are_as_ever() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
        assert hvd.allreduce_(tensor, op=hvd.Sum).tolist() == [hvd.size()] * 2
    assert hvd.allreduce_(tensor).tolist() == [hvd.size()] * 2
    assert hvd.synchronize(hvd.allreduce_async_(tensor)) is tensor
    together = [torch.ones(2), tensor]
    hvd.grouped_allreduce_(together)
    assert [each.tolist() for each in together] == [[1] * 2, [hvd.size()] * 2]
    assert together[0]._version == 1
    assert hvd.allreduce(tensor).tolist() == [hvd.size()] * 2


def case_a_result_has_a_gradient_where_its_tensor_wants_one() -> None:
    tensor = torch.ones(2, requires_grad=True)
    hvd.allreduce(tensor, op=hvd.Sum).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [hvd.size()] * 2


def case_errors_of_the_core_are_raised() -> None:
    tensor = torch.ones(2)
    if hvd.rank() > 0:
        hvd.barrier()  # so long the first one is in flight
    handle = hvd.allreduce_async_(tensor, name="twice")
    if hvd.rank() == 0 and hvd.size() > 1:
        assert not hvd.poll(handle)
        with pytest.raises(hvd.DuplicateNameError, match="twice"):
            hvd.allreduce_async_(torch.ones(1), name="twice")
        with pytest.raises(hvd.DuplicateNameError, match="twice"):
            hvd.allreduce(torch.ones(1), name="twice")
    if hvd.rank() == 0:
        hvd.barrier()
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match="there is no handle"):
        hvd.synchronize(handle)
    with pytest.raises(ValueError, match="there is no handle"):
        hvd.poll(handle)
    if hvd.size() > 1:
        for verb in (hvd.allreduce_, hvd.allreduce):
            with pytest.raises(hvd.MismatchError, match="shapes"):
                verb(torch.ones(1 + hvd.rank()), name="shape")
        handle = hvd.allreduce_async_(torch.ones(1 + hvd.rank()), name="later")
        with pytest.raises(hvd.MismatchError, match="later"):
            hvd.synchronize(handle)
    with pytest.raises(ValueError, match="root rank 99"):
        hvd.broadcast_(tensor, 99)


def case_bound_and_partial_verbs() -> None:
    tensor = torch.ones(2)
    summed = functools.partial(hvd.allreduce_, op=hvd.Sum, name="partial")
    assert summed(tensor).tolist() == [hvd.size()] * 2
    arguments = {"name": "spread", "op": hvd.Sum}
    assert hvd.allreduce_(*[torch.ones(1)], **arguments).tolist() == [hvd.size()]
    assert next(map(hvd.synchronize, [hvd.allreduce_async_(tensor)])) is tensor


def case_shutdown() -> None:
    hvd.shutdown()
    with pytest.raises(hvd.NotInitializedError):
        hvd.allreduce_(torch.ones(1))


@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_case(case: str, size: int):
    mpirun.cases_of(__file__, size).check(case)
