"""Train a small GPT to continue English text letter by letter; the embedding and the head share one matrix.

    python examples/char_gpt.py --steps 60

The text is the forty paragraphs of data/squad_small.json. Shapes: B batch, T letters, C width, H heads, D head width.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from squad import read_questions


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def attend(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        qkv = self.qkv(x).view(size, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.projection(context.transpose(1, 2).reshape(size, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class CharGPT(nn.Module):
    def __init__(self, num_letters: int, length: int, width: int, num_heads: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(num_letters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_letters, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.letters.weight

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, C) -> (B, T, letters)


@torch.no_grad()
def write(model: CharGPT, prompt: Tensor, num_letters: int, length: int) -> Tensor:
    """The prompt (T,) and the likeliest letters after it."""
    model.eval()
    for _ in range(num_letters):
        prompt = torch.cat([prompt, model(prompt[None, -length:])[0, -1:].argmax(-1)])
    model.train()
    return prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    text = "\n".join(dict.fromkeys(question.context for question in read_questions()))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    model = CharGPT(len(letters), args.length, args.width, args.heads, args.layers, args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)

    for step in range(1, args.steps + 1):
        places = torch.randint(len(data) - args.length, (args.batch_size, 1)) + torch.arange(args.length)
        optimizer.zero_grad()
        logits = model(data[places])
        loss = F.cross_entropy(logits.flatten(0, 1), data[places + 1].flatten())
        del logits
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    written = write(model, data[:16], 48, args.length)
    print(repr("".join(letters[i] for i in written)))


if __name__ == "__main__":
    main()
