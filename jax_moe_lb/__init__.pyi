"""Dropless mixture-of-experts layers for JAX with load-balanced expert parallelism."""

from . import aot as aot
from . import balancers as balancers
from . import calibrate as calibrate
from . import core as core
from . import kernels as kernels
from . import layer as layer
from . import nn as nn
from . import planners as planners
from . import routing as routing
from . import sim as sim
from . import transport as transport
from .aot import compiler_options as compiler_options
from .balancers import Balancer as Balancer
from .balancers import Chain as Chain
from .balancers import Cost as Cost
from .balancers import HostCallback as HostCallback
from .core import Plan as Plan
from .core import Stats as Stats
from .core import Topology as Topology
from .core import raise_on_fault as raise_on_fault
from .core import router_loss as router_loss
from .core import use_virtual_cpu_devices as use_virtual_cpu_devices
from .kernels import Experts as Experts
from .layer import System as System
from .layer import exact as exact
from .layer import feplb as feplb
from .layer import greedy as greedy
from .layer import hybridep as hybridep
from .layer import moe as moe
from .layer import plain as plain
from .layer import rails as rails
from .layer import systems as systems
from .layer import two_tier as two_tier
from .layer import ultraep as ultraep
from .nn import MoE as MoE
from .nn import as_linen as as_linen
from .nn import relocate as relocate
from .routing import Losses as Losses
from .routing import TokenInfo as TokenInfo
from .routing import TopK as TopK
from .transport import Dispatch as Dispatch
from .transport import Replicate as Replicate

__version__: str
