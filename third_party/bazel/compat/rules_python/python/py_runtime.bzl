"""The native rule, where a newer rules_python has it.

Continuous integration builds with Debian's Bazel 4 (ci/bazel.sh), in which the rule is still native.
"""

py_runtime = native.py_runtime
