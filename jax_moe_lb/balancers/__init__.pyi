"""Balancers: strategies editing a `Plan`, one file per paper."""

from .base import Balancer as Balancer
from .base import Chain as Chain
from .base import LayerCost as LayerCost
from .base import Plain as Plain
from .cost import Cost as Cost
from .eplb import EPLB as EPLB
from .eplb import EPLBPlus as EPLBPlus
from .exact import Exact as Exact
from .fastermoe import FasterMoE as FasterMoE
from .feplb import FEPLB as FEPLB
from .given import Given as Given
from .given import plan_all as plan_all
from .greedy import Greedy as Greedy
from .host_callback import HostCallback as HostCallback
from .hybridep import HybridEP as HybridEP
from .rails import RailS as RailS
from .rails import interface_rows as interface_rows
from .ultraep import UltraEP as UltraEP
