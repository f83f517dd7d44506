"""Train an LSTM on one long text, read in parallel streams; the hidden state is carried from step to step, detached.

    python examples/lstm_text.py --epochs 4

The text is the forty paragraphs of data/squad_small.json. Shapes: B streams, T letters of a step, C width.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from squad import read_questions

State = tuple[Tensor, Tensor]


class Reader(nn.Module):
    def __init__(self, num_letters: int, width: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.letters = nn.Embedding(num_letters, width)
        self.lstm = nn.LSTM(width, width, num_layers, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_letters)

    def forward(self, letters: Tensor, state: State | None) -> tuple[Tensor, State]:
        out, state = self.lstm(self.dropout(self.letters(letters)), state)  # (B, T) -> (B, T, C)
        return self.head(self.dropout(out)), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=48, help="streams read in parallel")
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--length", type=int, default=64, help="letters between two updates")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    text = "\n".join(dict.fromkeys(question.context for question in read_questions()))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    streams = data[: len(data) // args.batch_size * args.batch_size].view(args.batch_size, -1)
    model = Reader(len(letters), args.width, args.layers, args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)

    step = 0
    for epoch in range(1, args.epochs + 1):
        state = None
        for start in range(0, streams.shape[1] - 1, args.length):
            stop = min(start + args.length, streams.shape[1] - 1)
            logits, state = model(streams[:, start:stop], state)
            state = (state[0].detach(), state[1].detach())
            loss = F.cross_entropy(logits.flatten(0, 1), streams[:, start + 1 : stop + 1].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            print(f"epoch {epoch} step {step}: loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                return


if __name__ == "__main__":
    main()
