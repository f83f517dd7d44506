"""Train BERT as it was written in 2019 (pytorch-pretrained-bert) to answer questions, on a file beside this script.

    python examples/bert_2019.py --epochs 4

The package predates fused kernels: attention is matmul, softmax, dropout, matmul, and GELU is made of mul, div, erf and
add, so most of a step's memory is what those small calls keep for backward.
"""

from __future__ import annotations

import argparse

import torch
from pytorch_pretrained_bert.modeling import BertConfig, BertModel
from torch import Tensor, nn

from squad import build_vocabulary, encode, read_questions


class QuestionAnswering(nn.Module):
    """The encoder with one linear layer that gives every token two scores: begins the answer, ends it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertModel(config)
        self.bert.pooler.requires_grad_(False)  # its output is not used
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        sequence, _ = self.bert(tokens, segments, mask, output_all_encoded_layers=False)
        start_logits, end_logits = self.qa_outputs(sequence).split(1, dim=-1)  # (B, T, C) -> 2 of (B, T, 1)
        return start_logits.squeeze(-1), end_logits.squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--length", type=int, default=112, help="tokens of question and paragraph together")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    questions = read_questions()
    vocabulary = build_vocabulary(questions)
    encoded = encode(questions, vocabulary, args.length)
    config = BertConfig(
        len(vocabulary) + 4,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.length,
    )
    model = QuestionAnswering(config)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=args.learning_rate)
    criterion = nn.CrossEntropyLoss()

    step = 0
    for epoch in range(1, args.epochs + 1):
        for places in torch.randperm(len(questions)).split(args.batch_size):
            tokens, segments, mask, starts, ends = encoded.take(places)
            start_logits, end_logits = model(tokens, segments, mask)
            loss = (criterion(start_logits, starts) + criterion(end_logits, ends)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(f"epoch {epoch} step {step}: loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                return


if __name__ == "__main__":
    main()
