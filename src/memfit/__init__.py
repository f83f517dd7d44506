"""memfit: make a PyTorch training run fit into a memory budget given in bytes, and prove the results are the same."""

from memfit.api import fit, plan, trace, watch_growth
from memfit.core.errors import BudgetError, CertificateError, MemfitError, PlanError, TraceError, UnsupportedError

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "CertificateError",
    "MemfitError",
    "PlanError",
    "TraceError",
    "UnsupportedError",
    "fit",
    "plan",
    "trace",
    "watch_growth",
]
