"""A question-answering file in SQuAD's format, as tensors: reading, a word tokenizer made from the data, exact match.

Shared by bert_qa.py and bert_2019.py. B is the batch, T the padded length.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DATA = Path(__file__).parent / "data" / "squad_small.json"
PAD, UNKNOWN, CLS, SEP = range(4)


@dataclass(frozen=True)
class Question:
    """One question with its paragraph; the answer is context[answer_start : answer_start + len(answer)]."""

    text: str
    context: str
    answer: str
    answer_start: int


@dataclass(frozen=True)
class Encoded:
    """Questions as tensors (B, T), answers as token positions (B,); `spans[i][j]` is token j's place in context i."""

    tokens: Tensor
    segments: Tensor
    mask: Tensor
    starts: Tensor
    ends: Tensor
    spans: list[dict[int, tuple[int, int]]]

    def take(self, places: Tensor) -> tuple[Tensor, ...]:
        """The five tensors of the questions at `places`."""
        return tuple(x[places] for x in (self.tokens, self.segments, self.mask, self.starts, self.ends))


def read_questions(path: Path = DATA) -> list[Question]:
    """All questions of a SQuAD file, in its order."""
    questions = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                answer = qa["answers"][0]
                questions.append(Question(qa["question"], paragraph["context"], answer["text"], answer["answer_start"]))
    return questions


def split_words(text: str) -> list[tuple[str, int, int]]:
    """Lower-case words and single marks, with their places: 'No rain.' -> (no, 0, 2), (rain, 3, 7), (., 7, 8)."""
    return [(m.group().lower(), m.start(), m.end()) for m in re.finditer(r"\w+|[^\w\s]", text)]


def build_vocabulary(questions: list[Question]) -> dict[str, int]:
    """Word -> number, for every word in the data; 0 to 3 are the special tokens."""
    words = {word for question in questions for text in (question.text, question.context) for word, *_ in split_words(text)}
    return {word: number for number, word in enumerate(sorted(words), start=SEP + 1)}


def encode(questions: list[Question], vocabulary: dict[str, int], length: int) -> Encoded:
    """[CLS] question [SEP] context [SEP], padded to `length` tokens. Raises ValueError where that does not fit."""
    shape = (len(questions), length)
    tokens, segments, mask = (torch.full(shape, fill, dtype=torch.long) for fill in (PAD, 0, 0))
    starts, ends, spans = [], [], []
    for row, question in enumerate(questions):
        asked = [vocabulary.get(word, UNKNOWN) for word, *_ in split_words(question.text)]
        told = split_words(question.context)
        line = [CLS, *asked, SEP, *(vocabulary.get(word, UNKNOWN) for word, *_ in told), SEP]
        if len(line) > length:
            raise ValueError(f"{question.text!r} needs {len(line)} tokens with its paragraph and --length is {length}.")
        offset = len(asked) + 2
        tokens[row, : len(line)] = torch.tensor(line)
        segments[row, offset : len(line)] = 1
        mask[row, : len(line)] = 1
        answer_end = question.answer_start + len(question.answer)
        starts.append(offset + next(i for i, (_, start, _) in enumerate(told) if start >= question.answer_start))
        ends.append(offset + next(i for i, (_, _, end) in enumerate(told) if end >= answer_end))
        spans.append({offset + i: (start, end) for i, (_, start, end) in enumerate(told)})
    return Encoded(tokens, segments, mask, torch.tensor(starts), torch.tensor(ends), spans)


def find_answer(
    start_logits: list[float], end_logits: list[float], spans: dict[int, tuple[int, int]], max_words: int = 8
) -> slice:
    """The likeliest place of an answer of at most `max_words` words in a context. T logits each."""
    places = sorted(spans)
    _, first, last = max(
        (start_logits[a] + end_logits[b], a, b) for i, a in enumerate(places) for b in places[i : i + max_words]
    )
    return slice(spans[first][0], spans[last][1])


def count_exact(questions: list[Question], encoded: Encoded, start_logits: Tensor, end_logits: Tensor) -> int:
    """How many questions are answered word for word. Logits: (B, T)."""
    found = zip(questions, start_logits.tolist(), end_logits.tolist(), encoded.spans, strict=True)
    return sum(question.context[find_answer(starts, ends, spans)] == question.answer for question, starts, ends, spans in found)
