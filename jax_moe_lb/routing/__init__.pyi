"""Routers and router losses."""

from .losses import Losses as Losses
from .more_routers import ExpertChoice as ExpertChoice
from .more_routers import HashRouter as HashRouter
from .more_routers import NoisyTopK as NoisyTopK
from .routers import ForceBalanced as ForceBalanced
from .routers import GroupLimit as GroupLimit
from .routers import Router as Router
from .routers import RouterFunction as RouterFunction
from .routers import Routing as Routing
from .routers import TokenInfo as TokenInfo
from .routers import TopK as TopK
from .routers import updated_bias as updated_bias
