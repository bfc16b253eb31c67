"""What BUILD files load from rules_python, as the native rules."""

py_library = native.py_library
py_test = native.py_test
