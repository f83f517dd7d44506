"""`apex.normalization`: PyTorch's own norms, which have the same arguments and are fused themselves."""

from torch.nn import LayerNorm as FusedLayerNorm
from torch.nn import LayerNorm as MixedFusedLayerNorm
from torch.nn import RMSNorm as FusedRMSNorm
from torch.nn import RMSNorm as MixedFusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
