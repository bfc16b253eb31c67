"""Plans, topologies, statistics and validation, shared by all other packages."""

from .custom_calls import shadowed_installation as shadowed_installation
from .export import prepare_export as prepare_export
from .file_limits import FileLimits as FileLimits
from .plan import Plan as Plan
from .plan import imbalance as imbalance
from .plan import load as load
from .plan import plain_plan as plain_plan
from .plan import rows_between as rows_between
from .plan import straggler as straggler
from .plan import traffic as traffic
from .split import Split as Split
from .split import nearest_first as nearest_first
from .stats import Stats as Stats
from .stats import needs_more_rounds as needs_more_rounds
from .stats import raise_on_fault as raise_on_fault
from .stats import router_loss as router_loss
from .topology import Level as Level
from .topology import Topology as Topology
from .validation import check_plan as check_plan
from .virtual_devices import use_virtual_cpu_devices as use_virtual_cpu_devices
