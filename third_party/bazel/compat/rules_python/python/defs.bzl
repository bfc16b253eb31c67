"""What BUILD files load from rules_python, as the native rules.

Continuous integration builds with Debian's Bazel 4 (ci/bazel.sh), which would otherwise download rules_python.
"""

py_library = native.py_library
py_test = native.py_test
