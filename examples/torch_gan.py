"""Train a conditional GAN on scikit-learn's handwritten digits, and draw generated digits.

    hororun -np 2 python examples/torch_gan.py

Every line that makes it distributed is marked `# hvd`. At the end, a classifier trained on real
digits counts the generated ones that it reads as the requested digits.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hororing.torch as hvd  # hvd

NOISE = 32  # random numbers for a digit, beside its class


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60, help="epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of both networks")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers")
    return parser.parse_args()


def networks() -> tuple[nn.Module, nn.Module]:
    """The generator, and the critic, which distinguishes real and generated images."""
    generator = nn.Sequential(
        nn.Linear(NOISE + 10, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
        nn.Linear(256, 64), nn.Sigmoid(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Linear(64 + 10, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3),
        nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 1),
    )  # fmt: skip
    return generator, critic


def made(generator: nn.Module, kinds: torch.Tensor) -> torch.Tensor:
    """An image for each of `kinds`, one-hot rows [n, 10]: [n, 64], from 0 to 1."""
    return generator(torch.cat([torch.randn(len(kinds), NOISE), kinds], dim=1))


def draw(images: torch.Tensor) -> str:
    """Images beside each other, in characters."""
    shades = " .:*#"
    rows = (images.reshape(-1, 8, 8) * (len(shades) - 0.01)).long().transpose(0, 1).tolist()
    return "\n".join(
        "  ".join("".join(2 * shades[pixel] for pixel in part) for part in row) for row in rows
    )


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    torch.set_num_threads(1)  # enough for such small networks
    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    kinds = nn.functional.one_hot(torch.tensor(digits.target)).float()
    data = TensorDataset(images, kinds)
    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), seed=args.seed)  # hvd
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)

    generator, critic = networks()
    # Each network has an optimizer. The names of all their parameters differ.
    make = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    make = hvd.DistributedOptimizer(make, generator.named_parameters("generator"))  # hvd
    judge = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.999))
    judge = hvd.DistributedOptimizer(judge, critic.named_parameters("critic"))  # hvd
    for network, optimizer in ((generator, make), (critic, judge)):
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)  # hvd
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd
    torch.manual_seed(args.seed + hvd.rank())  # hvd: from here on each rank has its own noise

    softplus = nn.functional.softplus
    progress = tqdm(range(args.epochs), desc="train", disable=hvd.rank() != 0)  # hvd
    for epoch in progress:
        sampler.set_epoch(epoch)
        for real, kind in loader:
            fake = made(generator, kind)
            judge.zero_grad()
            of_real = critic(torch.cat([real, kind], dim=1))
            of_fake = critic(torch.cat([fake.detach(), kind], dim=1))
            judge_loss = (softplus(-of_real) + softplus(of_fake)).mean()
            judge_loss.backward()
            judge.step()

            make.zero_grad()
            critic.requires_grad_(False)  # so that only the generator's gradients are reduced
            make_loss = softplus(-critic(torch.cat([fake, kind], dim=1))).mean()
            make_loss.backward()
            critic.requires_grad_(True)
            make.step()
        losses = torch.stack([make_loss.detach(), judge_loss.detach()])
        losses = hvd.allreduce(losses, name="losses")  # hvd
        progress.set_postfix_str(f"generator {losses[0]:.2f}, critic {losses[1]:.2f}")

    if hvd.rank() == 0:  # hvd
        asked = torch.arange(10).repeat(100)
        with torch.no_grad():
            fakes = made(generator, nn.functional.one_hot(asked).float())
        reader = LogisticRegression(max_iter=1000).fit(images.numpy(), digits.target)
        read = torch.from_numpy(reader.predict(fakes.numpy()))
        print(draw(fakes[:10]))
        right = (read == asked).float().mean()
        print(f"{right:.3f} of the made digits are read as asked, {hvd.size()} ranks")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
