"""Train a small BERT on a text: it learns to guess masked bytes (arXiv:1810.04805).

    hororun -np 2 python examples/torch_masked_language_model.py
    hororun -np 8 python examples/torch_masked_language_model.py --text FILE --width 768 \
        --layers 12 --heads 12 --length 512 --bf16-allreduce

Bytes need no vocabulary, so any text will do. Without --text it is a part of Newton's Opticks
(1730); its last tenth is the test set.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import hororing.torch as hvd  # hvd

MASK = 256  # follows the 256 bytes
PART = 0.15  # of the bytes are to be guessed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    text = Path(__file__).parent / "data/opticks.txt"
    parser.add_argument("--text", type=Path, default=text, help="what to learn")
    parser.add_argument("--steps", type=int, default=2000, help="steps")
    parser.add_argument("--batch-size", type=int, default=16, help="passages per pass and rank")
    parser.add_argument("--length", type=int, default=128, help="bytes per passage")
    parser.add_argument("--width", type=int, default=128, help="numbers per byte inside the model")
    parser.add_argument("--layers", type=int, default=4, help="of the encoder")
    parser.add_argument("--heads", type=int, default=4, help="of attention")
    parser.add_argument("--lr", type=float, default=0.001, help="after the warmup")
    parser.add_argument("--warmup-steps", type=int, default=100, help="to the full rate")
    parser.add_argument("--passes", type=int, default=1, help="backward passes per step")
    parser.add_argument("--bf16-allreduce", action="store_true", help="send 16-bit gradients")
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers")
    return parser.parse_args()


class Bert(nn.Module):
    """An encoder of bytes [batch, length]; returns scores of the 256 bytes for each of them."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(257, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        nn.init.normal_(self.bytes.weight, std=0.02)
        # Adds each byte's neighbours at once; a byte alone has less meaning than a word.
        self.neighbours = nn.Conv1d(width, width, kernel_size=9, padding=4)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.bias = nn.Parameter(torch.zeros(256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen = self.bytes(tokens)
        near = self.neighbours(seen.transpose(1, 2)).transpose(1, 2)
        found = self.encoder(seen + nn.functional.gelu(near) + self.places)
        return found @ self.bytes.weight[:256].T + self.bias


def masked(
    text: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`count` random passages: the original, the masked input, and the positions to guess.

    Of the bytes to be guessed, 80 % are masked, 10 % are others, and 10 % stay.
    """
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    passages = text[starts + torch.arange(length)].long()
    order = torch.rand(count, length, generator=generator).argsort(dim=1)
    guessed = order < round(PART * length)  # the same number on every rank
    fate = torch.rand(count, length, generator=generator)
    others = torch.randint(256, (count, length), generator=generator)
    seen = torch.where(guessed & (fate < 0.8), MASK, passages)
    seen = torch.where(guessed & (fate >= 0.9), others, seen)
    return passages, seen, guessed


def readable(tokens: torch.Tensor) -> str:
    """Text, with _ for masked bytes."""
    return "".join("_" if token == MASK else chr(token) for token in tokens.tolist())


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")  # hvd
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    end = len(text) * 9 // 10
    if len(text) - end < args.length:
        raise ValueError(f"{args.text} is too short: {len(text)} bytes")
    torch.manual_seed(args.seed)
    model = Bert(args.width, args.layers, args.heads, args.length).to(device)
    optimizer = hvd.DistributedOptimizer(  # hvd
        torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01),
        named_parameters=model.named_parameters(),  # hvd
        compression=hvd.Compression.bf16 if args.bf16_allreduce else hvd.Compression.none,  # hvd
        backward_passes_per_step=args.passes,  # hvd
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / max(1, args.warmup_steps), (args.steps - step) / args.steps),
    )

    def loss_of(part: torch.Tensor, count: int) -> torch.Tensor:
        """The mean over the guessed bytes, in nats."""
        passages, seen, guessed = masked(part, count, args.length, generator)
        scores = model(seen.to(device))[guessed.to(device)]
        return nn.functional.cross_entropy(scores, passages[guessed].to(device))

    generator = torch.Generator().manual_seed(args.seed + hvd.rank())  # hvd: other passages
    torch.manual_seed(args.seed + hvd.rank())  # hvd: other dropout
    progress = tqdm(range(args.steps), desc="train", disable=hvd.rank() != 0)  # hvd
    for step in progress:
        optimizer.zero_grad()
        for _ in range(args.passes):
            loss = loss_of(text[:end], args.batch_size)
            (loss / args.passes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            mean = hvd.allreduce(loss.detach(), name="loss").item()  # hvd
            progress.set_postfix(loss=f"{mean:.3f}", refresh=False)

    model.eval()
    with torch.no_grad():
        test = torch.stack([loss_of(text[end:], args.batch_size) for _ in range(10)]).mean()
        test = hvd.allreduce(test, name="test").item()  # hvd
        if hvd.rank() == 0:  # hvd
            passages, seen, guessed = masked(text[end:], 1, args.length, generator)
            guess = torch.where(guessed, model(seen.to(device)).argmax(dim=2).cpu(), passages)
            for what, tokens in (("seen", seen), ("guessed", guess), ("written", passages)):
                print(f"--- {what}\n{readable(tokens[0])}")
            print(f"test loss {test:.3f} after {args.steps} steps on {hvd.size()} ranks")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
