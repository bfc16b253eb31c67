"""Transport of tokens (dispatches) and of expert weights (replications)."""

from jax_moe_lb.transport.compression import Codec, CodecBase, QuantizedTransfer
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import CopyDispatch, Dispatch
from jax_moe_lb.transport.exchange import Buffers, Saved
from jax_moe_lb.transport.expert_domains import ExpertDomains, GatherExpertDomain, hybrid_mesh
from jax_moe_lb.transport.forward import Forward
from jax_moe_lb.transport.fsdp import FsdpExperts, scan_prefetched
from jax_moe_lb.transport.once import Once
from jax_moe_lb.transport.replicate import Gather, PeerCopy, Relay, Replicate
from jax_moe_lb.transport.rule import AutoDispatch, DispatchChoice, dispatch_by_rule
from jax_moe_lb.transport.spray import MultiRailDispatch
from jax_moe_lb.transport.two_phase import TwoPhase

__all__ = [
    "AutoDispatch",
    "Buffers",
    "Codec",
    "CodecBase",
    "CopyDispatch",
    "Direct",
    "Dispatch",
    "DispatchChoice",
    "dispatch_by_rule",
    "ExpertDomains",
    "Forward",
    "Gather",
    "hybrid_mesh",
    "GatherExpertDomain",
    "Once",
    "PeerCopy",
    "Relay",
    "Replicate",
    "Saved",
    "scan_prefetched",
    "FsdpExperts",
    "MultiRailDispatch",
    "TransportCost",
    "TwoPhase",
    "QuantizedTransfer",
]


def __dir__() -> list[str]:
    return __all__
