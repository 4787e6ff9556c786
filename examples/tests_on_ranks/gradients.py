"""What is tested: gradients, averaged by code that knows torch.distributed only."""

import torch
import torch.distributed as dist


def average_gradients(model: torch.nn.Module) -> None:
    """Replace each gradient by its mean over all ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
