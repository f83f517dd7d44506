"""apex's own names for scripts that were written for NVIDIA's apex, whose `amp` was removed in 2025.

    from memfit.integrations.apex import amp      # instead of: from apex import amp

Under `memfit run` the script's own `from apex import amp` finds this where apex, or its amp, is not installed (`standing_in`). Behaviour follows
apex's public documentation (nvidia.github.io/apex); where it differs is listed in docs/precision.md.
"""

from memfit.integrations.apex.finder import standing_in

__all__ = ["standing_in"]
