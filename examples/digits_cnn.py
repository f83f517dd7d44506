"""Train a convolutional network with batch norm on scikit-learn's handwritten digits, and test it after every epoch.

    python examples/digits_cnn.py --epochs 10

Shapes: B batch, C channels, Y x X pixels (8 x 8, drawn twice as large).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm_1(self.conv_1(x)))
        out = self.norm_2(self.conv_2(out))
        out += x
        return self.relu(out)


def build_model(channels: int, num_blocks: int) -> nn.Module:
    return nn.Sequential(
        nn.Upsample(scale_factor=2.0, mode="bilinear"),  # (B, 1, 8, 8) -> (B, 1, 16, 16)
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        *(Residual(channels) for _ in range(num_blocks)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4 * channels, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images that are read correctly."""
    model.eval()
    accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=240)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (B, Y, X) -> (B, 1, Y, X)
    labels = torch.tensor(digits.target)
    num_test = len(labels) // 5
    model = build_model(args.channels, args.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=5e-4)

    step = 0
    for epoch in range(1, args.epochs + 1):
        losses = []
        for places in (torch.randperm(len(labels) - num_test) + num_test).split(args.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[places]), labels[places])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == args.steps:
                break
        accuracy = evaluate(model, images[:num_test], labels[:num_test])
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}, test accuracy {accuracy:.1%}", flush=True)
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
