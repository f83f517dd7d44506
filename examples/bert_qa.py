"""Train a small transformers BERT to answer questions, from a configuration and a file beside this script.

    python examples/bert_qa.py --epochs 6

The model starts from random weights and the data is small, so it learns its 120 questions by heart rather than English:
exact match is on the questions it trains on.
"""

from __future__ import annotations

import argparse

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForQuestionAnswering

from squad import Encoded, Question, build_vocabulary, count_exact, encode, read_questions


def build_model(num_words: int, args: argparse.Namespace) -> BertForQuestionAnswering:
    config = BertConfig(
        vocab_size=num_words,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.length,
        attn_implementation=args.attention,
    )
    return BertForQuestionAnswering(config)


@torch.no_grad()
def evaluate(model: BertForQuestionAnswering, questions: list[Question], encoded: Encoded, batch_size: int) -> float:
    """Share of the questions that are answered word for word."""
    model.eval()
    starts, ends = [], []
    for places in torch.arange(len(questions)).split(batch_size):
        tokens, segments, mask, *_ = encoded.take(places)
        out = model(input_ids=tokens, token_type_ids=segments, attention_mask=mask)
        starts.append(out.start_logits)
        ends.append(out.end_logits)
    model.train()
    return count_exact(questions, encoded, torch.cat(starts), torch.cat(ends)) / len(questions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--length", type=int, default=112, help="tokens of question and paragraph together")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    questions = read_questions()
    vocabulary = build_vocabulary(questions)
    encoded = encode(questions, vocabulary, args.length)
    model = build_model(len(vocabulary) + 4, args)
    model.train()

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    num_steps = args.epochs * -(-len(questions) // args.batch_size)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))
    step = 0
    for epoch in range(1, args.epochs + 1):
        losses = []
        for places in torch.randperm(len(questions)).split(args.batch_size):
            tokens, segments, mask, starts, ends = encoded.take(places)
            out = model(
                input_ids=tokens,
                token_type_ids=segments,
                attention_mask=mask,
                start_positions=starts,
                end_positions=ends,
            )
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(out.loss.item())
            step += 1
            if step == args.steps:
                break
        exact = evaluate(model, questions, encoded, args.batch_size)
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}, exact match {exact:.1%}", flush=True)
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
