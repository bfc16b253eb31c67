"""Transport of tokens (dispatches) and of expert weights (replications)."""

from .compression import Codec as Codec
from .compression import CodecBase as CodecBase
from .compression import QuantizedTransfer as QuantizedTransfer
from .cost import TransportCost as TransportCost
from .direct import Direct as Direct
from .dispatch import CopyDispatch as CopyDispatch
from .dispatch import Dispatch as Dispatch
from .exchange import Buffers as Buffers
from .exchange import Saved as Saved
from .expert_domains import ExpertDomains as ExpertDomains
from .expert_domains import GatherExpertDomain as GatherExpertDomain
from .expert_domains import hybrid_mesh as hybrid_mesh
from .forward import Forward as Forward
from .fsdp import FsdpExperts as FsdpExperts
from .fsdp import scan_prefetched as scan_prefetched
from .once import Once as Once
from .replicate import Gather as Gather
from .replicate import PeerCopy as PeerCopy
from .replicate import Relay as Relay
from .replicate import Replicate as Replicate
from .rule import AutoDispatch as AutoDispatch
from .rule import DispatchChoice as DispatchChoice
from .rule import dispatch_by_rule as dispatch_by_rule
from .spray import MultiRailDispatch as MultiRailDispatch
from .two_phase import TwoPhase as TwoPhase
