"""`local_deps` for bzlmod, in a file of its own: the Bazel 4 of continuous integration has no module_extension."""

load(":local_deps.bzl", "local_deps")

def _local_deps_extension(_ctx):
    local_deps(name = "local_deps")

local_deps_extension = module_extension(implementation = _local_deps_extension)
