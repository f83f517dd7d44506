"""Precision: opt levels O0 to O3 on `torch.autocast` and `torch.amp.GradScaler`. Exactness: approximate, the user must ask for it.

    forward.py     forward passes under autocast (O1), or with half weights made from the float32 ones (O2), or in half (O3)
    casting.py     nested values and a module's weights, cast and put back
    scaling.py     the loss scaled, gradients unscaled and examined before the backward call returns
    leaves.py      which tensors a backward pass will reach; whether the optimizer updates what they read
    weights.py     which weights a level can take
    inspection.py  which module first made an infinity

How it stands in an unmodified script: `memfit.runtime.precision`. Under apex's names: `memfit.integrations.apex`. Both are
described in docs/precision.md.
"""
