"""Runs a script with an extension module of another build: run_with_module.py NAME FILE SCRIPT [ARGUMENTS]."""

import importlib.util
import runpy
import sys

if __name__ == "__main__":
    name, file, *sys.argv = sys.argv[1:]
    spec = importlib.util.spec_from_file_location(name, file)
    # Where an import of the name looks first.
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    sys.path.insert(0, "")
    runpy.run_path(sys.argv[0], run_name="__main__")
