"""SyncBatchNorm: batch normalisation over the batches of several ranks.

Every rank reduces its batch to count, mean and sum of squared deviations (M2) per channel; one
allgather and Chan's formula (torch/_tensor/batch_statistics.py) make them those of the whole
batch. The message is float64, so that counts are exact, and has 8 (2 C + 1) bytes per rank. The
backward pass adds up two sums per channel in one allreduce.

Sums are of float32 for float16 and bfloat16 inputs, else of the input's own type.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hororing._adapters.batch_norm_groups import Grouped
from hororing._requests.arguments import Sum
from hororing._requests.process_sets import ProcessSet, check_type, global_process_set
from hororing.torch import recomputation
from hororing.torch._tensor.batch_statistics import local_statistics, merged
from hororing.torch._tensor.uncompiled import uncompiled
from hororing.torch._tensor.verbs import verbs

# Type of the sums, by that of the input.
_SUMS: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}

_layer_numbers = itertools.count(1)

# By the name of a request, which must not be in flight twice. A layer used by two threads at once
# sends one request after the other. (Numbers in names would not help: ranks may number the calls
# differently.)
_locks: dict[str, threading.Lock] = {}


class SyncBatchNorm(Grouped, _BatchNorm):
    """Batch normalisation of inputs (N, C, ...) with the statistics of several ranks' batches.

    Does what torch's BatchNorm1d, 2d and 3d would do with the batches of all ranks joined, which
    may differ in length; some may be empty. In training every forward pass sends one request, and
    so does every backward pass that computes the gradient of the input: all ranks must make them
    in the same order. In evaluation, and where a group is one rank, nothing is sent.

    Gradients of weight and bias are this rank's part of the sum, as in torch.nn.SyncBatchNorm:
    DistributedOptimizer reduces them like any other.

    With `group_size`, ranks share statistics only within their group, so the running statistics
    of groups differ: average them before evaluation and checkpoints. Groups are process sets, which
    the first layer that needs them registers. Therefore all ranks of the job, members of
    `process_set` or not, must create such layers in the same way, after `init()`. (After another
    `init()`, or in a layer that was read from a file, the next forward pass in training does it.)

    Parameters
    ----------
    num_features, eps, momentum, affine, track_running_stats, device, dtype, bias : optional
        As for torch.nn.BatchNorm2d.
    process_set : ProcessSet, optional
        The ranks that share statistics.
    group_size : int, optional
        Divide `process_set` into groups of this many consecutive ranks. It must divide the size
        of the set; 1 means no communication. See docs/large_batch.md for the choice.
    name : str, optional
        Of its requests, equal on all ranks; when omitted, unnamed layers are numbered as they
        are made. Copies of a layer share it.

    Raises
    ------
    ValueError : from forward in training, on every rank of the group, when their batches have fewer
        than two values per channel; and on a rank that is not in `process_set`.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), hvd.SyncBatchNorm(16))
    >>> features = model(torch.randn(4, 3, 8, 8))
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        process_set: ProcessSet = global_process_set,
        group_size: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # not every torch has this argument in the base
            self.register_parameter("bias", None)
        self.name = f"sync_batch_norm.{next(_layer_numbers)}" if name is None else name
        check_type(process_set, self._title())
        self.share(process_set, group_size)

    @classmethod
    def convert_sync_batchnorm(
        cls,
        module: nn.Module,
        process_set: ProcessSet = global_process_set,
        group_size: int | None = None,
    ) -> nn.Module:
        """Replace every BatchNorm layer in `module`, and return it.

        The new layers share parameters and buffers with the old ones, and have their mode and
        qconfig. If `module` itself is a BatchNorm layer, a new module is returned.
        """
        done: dict[nn.Module, nn.Module] = {}  # a layer in several places stays one layer

        def convert(old: nn.Module) -> nn.Module:
            if old not in done:
                done[old] = (
                    cls._like(old, process_set, group_size) if isinstance(old, _BatchNorm) else old
                )
                for name, child in old._modules.items():
                    if child is not None:
                        old._modules[name] = convert(child)
            return done[old]

        return convert(module)

    @classmethod
    def _like(
        cls, old: _BatchNorm, process_set: ProcessSet, group_size: int | None
    ) -> SyncBatchNorm:
        if isinstance(old, LazyModuleMixin) and old.has_uninitialized_params():
            raise ValueError(
                f"convert_sync_batchnorm: {type(old).__name__} does not know its channels yet; "
                "pass a batch through the model first"
            )
        new = cls(
            old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats,
            process_set=process_set, group_size=group_size,
        )  # fmt: skip
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, getattr(old, name))
        if hasattr(old, "qconfig"):
            new.qconfig = old.qconfig
        new.train(old.training)
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input`; in training also update the running statistics."""
        self._check_input_dim(input)
        result: torch.Tensor = self._train(input) if self.training else super().forward(input)
        return result

    @uncompiled
    def _train(self, input: torch.Tensor) -> torch.Tensor:
        group = self._sharing()
        if group is not None and len(group.ranks) > 1:
            return self._synchronized(input, group)
        self._check_count(input.numel() // max(input.size(1), 1))
        result: torch.Tensor = super().forward(input)
        return result

    def extra_repr(self) -> str:
        """Describe the layer, and the ranks that share its statistics if those are not all."""
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        if self.process_set is not global_process_set:
            text += f", process_set={self.process_set.ranks}"
        return text if self.group_size is None else f"{text}, group_size={self.group_size}"

    def _title(self) -> str:
        return f"SyncBatchNorm '{self.name}'"

    def _check_input_dim(self, input: torch.Tensor) -> None:
        shape = tuple(input.shape)
        if len(shape) < 2 or shape[1] != self.num_features:
            raise ValueError(
                f"{self._title()} takes inputs of shape (N, {self.num_features}, ...), not {shape}"
            )
        if input.dtype not in _SUMS:
            raise TypeError(
                f"{self._title()} takes inputs of type {', '.join(map(str, _SUMS))}, "
                f"not {input.dtype}"
            )

    def _check_count(self, count: int) -> None:
        if count < 2:
            raise ValueError(
                f"{self._title()}: the batches of all ranks have {count} values "
                "per channel; training needs at least 2. Pass larger batches, or call eval()"
            )

    def _synchronized(self, input: torch.Tensor, group: ProcessSet) -> torch.Tensor:
        with torch.no_grad():
            statistics = recomputation.stored(self.name)
            if statistics is None:
                statistics = self._gather(input, group)
                recomputation.store(self.name, statistics)
                if self.track_running_stats:
                    self._track(statistics[1], statistics[2] / (statistics[0] - 1))
            count, mean, m2 = statistics
        result: torch.Tensor = _normalize(
            input, self.weight, self.bias, mean, m2 / count, count, self, group
        )
        return result

    def _gather(
        self, input: torch.Tensor, group: ProcessSet
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return count, mean and M2 of all batches."""
        values = input.to(_SUMS[input.dtype])
        count, mean, m2 = local_statistics(values, _all_but_channels(values))
        channels = len(mean)
        mine = torch.cat([mean, m2, mean.new_tensor([count])])[None]
        name = f"{self.name}.forward"
        with _locks.setdefault(name, threading.Lock()):
            rows = verbs.allgather(mine, name=name, process_set=group)
        means, m2s, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
        total, mean, m2 = merged(counts, means, m2s)
        self._check_count(int(total))
        return int(total), mean, m2

    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        weight = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                weight = 1 / int(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
            if running is not None:
                running.copy_(running.double().lerp(new, weight))

    def _add_up(self, sums: torch.Tensor, group: ProcessSet) -> torch.Tensor:
        """Sum over the ranks, in a backward pass."""
        name = f"{self.name}.backward"
        with _locks.setdefault(name, threading.Lock()):
            return verbs.allreduce(sums, name=name, op=Sum, process_set=group)


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def _per_channel(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(-1, *[1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    """Normalisation of one rank's batch by given statistics, which depend on all batches."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int,
        layer: SyncBatchNorm,
        group: ProcessSet,
    ) -> torch.Tensor:
        sums = _SUMS[input.dtype]
        inverse = (variance + layer.eps).rsqrt().to(sums)
        mean = mean.to(sums)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.count, ctx.layer, ctx.group = count, layer, group
        return functional.batch_norm(
            input,
            mean,
            variance.to(sums),
            None if weight is None else weight.to(sums),
            None if bias is None else bias.to(sums),
            eps=layer.eps,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        # With x' = x - mean, r = 1 / sqrt(variance + eps), sums S and Q over all ranks:
        #   S = sum dy,  Q = sum dy x',  dx = weight r (dy - S / count - x' r^2 Q / count)
        # (Ioffe, Szegedy: Batch normalization, 2015, section 3.)
        input, weight, mean, inverse = ctx.saved_tensors
        grad_output = grad_output.to(mean.dtype)
        others = _all_but_channels(input)
        centred = input.to(mean.dtype) - _per_channel(mean, input)
        sums = torch.stack([grad_output.sum(others), (grad_output * centred).sum(others)])
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            mean_gradient, slope = ctx.layer._add_up(sums, ctx.group) / ctx.count
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            grad_input = torch.addcmul(
                grad_output - _per_channel(mean_gradient, input),
                centred,
                _per_channel(-slope * inverse.square(), input),
            )
            grad_input = grad_input.mul_(_per_channel(scale, input)).to(input.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (sums[1] * inverse).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sums[0].to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


_normalize: Any = _Normalize.apply  # torch does not declare its type
