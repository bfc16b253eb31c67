"""The rule of Bazel's own tools, where a newer rules_python has it.

Continuous integration builds with Debian's Bazel 4 (ci/bazel.sh), which still has this rule among its tools.
"""

load("@bazel_tools//tools/python:toolchain.bzl", _py_runtime_pair = "py_runtime_pair")

py_runtime_pair = _py_runtime_pair
