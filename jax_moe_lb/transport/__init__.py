"""Transport of tokens (dispatches) and of expert weights (replications)."""

from lazy_loader import attach_stub

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

# Imported at first use: a layer needs few of them.
__getattr__, __dir__, _ = attach_stub(__name__, __file__)
