"""A training script for Horovod: automatic mixed precision with a gradient scaler.

It knows nothing of hororing. The initial scale is so high that the first steps overflow, but not on
all ranks; all ranks must skip the same steps.
"""

import horovod.torch as hvd
import torch
from torch import nn

STEPS = 60


def main():
    hvd.init()
    torch.manual_seed(1234)
    torch.set_num_threads(1)

    truth = torch.randn(8, 3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * hvd.size() ** 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    first_scale = 2.0**22
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=1000)
    generator = torch.Generator().manual_seed(hvd.rank())
    losses = []
    for _ in range(STEPS):
        # Later ranks have larger numbers, which overflow at smaller scales.
        inputs = (1 + hvd.rank()) * torch.randn(32, 8, generator=generator)
        targets = torch.tanh(inputs @ truth)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(inputs)
            loss = nn.functional.mse_loss(output.float(), targets)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = hvd.allgather(weights.unsqueeze(0), name="weights")
    assert torch.equal(everywhere, weights.expand_as(everywhere)), "ranks hold different weights"
    steps = [int(state["step"]) for state in optimizer.state.values()]
    outcome = (steps, scaler.get_scale())
    assert hvd.allgather_object(outcome, name="outcome") == [outcome] * hvd.size()
    skipped = STEPS - steps[0]
    assert 0 < skipped < STEPS // 2, f"{skipped} steps were skipped"
    assert scaler.get_scale() == first_scale / 2**skipped
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    if hvd.rank() == 0:
        print(f"done: loss {losses[0]:.4f} to {losses[-1]:.4f}, {hvd.size()} ranks")


if __name__ == "__main__":
    main()
