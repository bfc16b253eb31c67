"""The native rule, where a newer rules_python has it."""

py_runtime = native.py_runtime
