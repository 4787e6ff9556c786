"""A training script for Horovod: ranks with different amounts of data, and join().

It knows nothing of hororing. A rank joins after its last batch and takes no more steps, so the
weights of the rank that joined last are the final ones.
"""

import horovod.torch as hvd
import torch
from torch import nn

EPOCHS = 3
BATCH = 16


def main():
    hvd.init()
    torch.manual_seed(5)
    torch.set_num_threads(1)

    truth = torch.randn(6, 1)
    batches = 8 + 5 * ((hvd.rank() + 1) % hvd.size())  # the last rank has the fewest
    inputs = torch.randn(
        batches * BATCH, 6, generator=torch.Generator().manual_seed(100 + hvd.rank())
    )
    targets = inputs @ truth

    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    first_loss = None
    for epoch in range(EPOCHS):
        for piece, target in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(piece), target)
            loss.backward()
            optimizer.step()
            first_loss = first_loss if first_loss is not None else loss.detach()
        last = hvd.join()
        most = max(hvd.size() - 2, 0)  # of all ranks, this one has the most batches
        assert last == most, f"rank {last} joined last, not rank {most}"
        # Ranks that had joined have missed the last steps.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        loss = hvd.allreduce(loss.detach(), name=f"loss {epoch}")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.6f}, rank {last} joined last", flush=True)

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = hvd.allgather(weights.unsqueeze(0), name="weights")
    assert torch.equal(everywhere, weights.expand_as(everywhere)), "ranks hold different weights"
    assert loss < 0.1 * hvd.allreduce(first_loss, name="first loss")
    if hvd.rank() == 0:
        print(f"done: {EPOCHS} epochs, {hvd.size()} ranks")


if __name__ == "__main__":
    main()
