"""What a program will hold and do on a machine that is not there, read off what its compiler makes of it.

Use it to see memory, operations and collectives of a layer, or of a program of yours, before there is a machine;
`docs/compiling.md` says what each number means.
"""

from jax_moe_lb.compiled.collectives import Collective as Collective
from jax_moe_lb.compiled.layer import LayerSizes as LayerSizes
from jax_moe_lb.compiled.layer import compile_layer as compile_layer
from jax_moe_lb.compiled.logs import quiet_stderr as quiet_stderr
from jax_moe_lb.compiled.memory import Buffer as Buffer
from jax_moe_lb.compiled.program import compile_for as compile_for
from jax_moe_lb.compiled.report import Operation as Operation
from jax_moe_lb.compiled.report import Report as Report
from jax_moe_lb.compiled.tables import print_report as print_report
from jax_moe_lb.compiled.targets import Target as Target
from jax_moe_lb.compiled.targets import use_no_accelerators as use_no_accelerators
