"""A 64-bit fingerprint of a storage's bits, on its own device, in two passes and without a copy.

Column sums and row sums of the bits read as a matrix of 64-bit integers, each weighted by place: any changed, moved or redrawn
content changes it but for a chance of about 2**-64; the same bits always give the same number.
"""

from __future__ import annotations

import torch

_COLUMNS = 1024
_MASK = (1 << 64) - 1


def fingerprint(storage: torch.UntypedStorage) -> int:
    """The fingerprint of all bytes of the storage."""
    num_words, num_tail = divmod(storage.nbytes(), 8)
    total = storage.nbytes()
    device = storage.device
    num_rows, num_rest = divmod(num_words, _COLUMNS)
    if num_rows:
        matrix = torch.empty(0, dtype=torch.int64, device=device).set_(storage, 0, (num_rows, _COLUMNS), (_COLUMNS, 1))
        total = _mix(total, _weighted(matrix.sum(0)))
        total = _mix(total, _weighted(matrix.sum(1)))
    if num_rest:
        rest = torch.empty(0, dtype=torch.int64, device=device).set_(storage, num_rows * _COLUMNS, (num_rest,), (1,))
        total = _mix(total, _weighted(rest))
    if num_tail:
        tail = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, num_words * 8, (num_tail,), (1,))
        total = _mix(total, int.from_bytes(bytes(tail.tolist()), "little"))
    return total


def _weighted(words: torch.Tensor) -> int:
    weights = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device=words.device)
    return int((weights.mul_(0x9E3779B97F4A7C15 - (1 << 64)).bitwise_or_(1).mul_(words)).sum().item())


def _mix(total: int, word: int) -> int:
    total = (total ^ (word & _MASK)) & _MASK
    total = (total * 0xD6E8FEB86659FD93) & _MASK
    return total ^ (total >> 32)
