"""Check at import that the extra `[tools]` is installed; `sim` imports it first."""

from jax_moe_lb.core.extras import require_tools

require_tools()
