"""Images per second of a ResNet on synthetic images, with the options of Horovod's benchmark.

    python examples/torch_synthetic_benchmark.py                    # one process
    hororun -np 2 python examples/torch_synthetic_benchmark.py      # two

Compare the total with the figure of one process to see the scaling.
"""

import argparse
import statistics
import time

import torch
from resnet import MODELS
from torch import nn
from tqdm import tqdm

import hororing.torch as hvd  # hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="network")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--image-size", type=int, default=224, help="pixels per side")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps per figure")
    parser.add_argument("--num-iters", type=int, default=10, help="figures")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send 16-bit gradients")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")  # hvd
    torch.backends.cudnn.benchmark = True  # all images have one size
    torch.manual_seed(1)
    model = MODELS[args.model]().to(device)
    # Adasum needs no larger rate for more ranks.
    rate = 0.01 * (1 if args.use_adasum else hvd.size())  # hvd
    optimizer = hvd.DistributedOptimizer(  # hvd
        torch.optim.SGD(model.parameters(), lr=rate),
        named_parameters=model.named_parameters(),  # hvd
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,  # hvd
        op=hvd.Adasum if args.use_adasum else hvd.Average,  # hvd
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(0, 1000, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def steps(number: int) -> float:
        """Seconds that `number` steps take."""
        begin = time.perf_counter()
        for _ in range(number):
            step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    kind = "GPU" if cuda else "CPU"
    if hvd.rank() == 0:  # hvd
        print(f"{args.model}, {args.batch_size} images per step on each of {hvd.size()} {kind}(s)")
    steps(args.num_warmup_batches)
    rates = [
        args.batch_size * args.num_batches_per_iter / steps(args.num_batches_per_iter)
        for _ in tqdm(range(args.num_iters), desc="measure", disable=hvd.rank() != 0)  # hvd
    ]
    # Twice the standard deviation holds 95 of 100 figures, if they are normally distributed.
    mean, spread = statistics.mean(rates), 2 * statistics.pstdev(rates)
    if hvd.rank() == 0:  # hvd
        print(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
        total, spread = hvd.size() * mean, hvd.size() * spread  # hvd
        print(f"Total img/sec on {hvd.size()} {kind}(s): {total:.1f} +-{spread:.1f}")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
