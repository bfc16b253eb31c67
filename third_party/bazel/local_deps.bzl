"""Repository `local_deps`: headers out of an installed Python environment and CUDA toolkit. Downloads nothing.

The interpreter is $JAX_MOE_LB_PYTHON, else that of $VIRTUAL_ENV, else python3. It must
have jaxlib, nanobind and pybind11. A CUDA toolkit is found through nvcc on the PATH.
"""

_PROBE = """
import os, sys, sysconfig
import jaxlib, nanobind, pybind11
print(sys.executable)
print(sysconfig.get_path("include"))
print(os.path.join(os.path.dirname(jaxlib.__file__), "include"))
print(os.path.dirname(nanobind.__file__))
print(pybind11.get_include())
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(name = "python", hdrs = glob(["python/**/*.h"]), includes = ["python"])

cc_library(name = "xla_ffi", hdrs = glob(["xla_ffi/**/*.h"]), includes = ["xla_ffi"])

cc_library(name = "pybind11", hdrs = glob(["pybind11/**/*.h"]), includes = ["pybind11"], deps = [":python"])

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h", "nanobind/ext/robin_map/include/**/*.h"]),
    copts = ["-fvisibility=hidden", "-fno-strict-aliasing", "-w"],
    defines = ["NDEBUG", "NB_COMPACT_ASSERTIONS"],
    includes = ["nanobind/include", "nanobind/ext/robin_map/include"],
    textual_hdrs = glob(["nanobind/src/*.h", "nanobind/src/*.cpp"], exclude = ["nanobind/src/nb_combined.cpp"]),
    deps = [":python"],
)

cc_library(
    name = "cudart",
    hdrs = glob(["cuda/**"], allow_empty = True),
    includes = ["cuda"],
    linkopts = {cuda_linkopts},
)

py_runtime(name = "py3_runtime", interpreter_path = "{python}", python_version = "PY3")

py_runtime_pair(name = "py_runtime_pair", py3_runtime = ":py3_runtime")

toolchain(
    name = "python_toolchain",
    toolchain = ":py_runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _python(ctx):
    env = ctx.os.environ
    if env.get("JAX_MOE_LB_PYTHON"):
        return env["JAX_MOE_LB_PYTHON"]
    if env.get("VIRTUAL_ENV"):
        return env["VIRTUAL_ENV"] + "/bin/python"
    return str(ctx.which("python3"))

def _cuda_toolkit(ctx):
    """The toolkit's directory, or None. nvcc may be a wrapper script, so it is asked."""
    nvcc = ctx.which("nvcc")
    if not nvcc:
        return None
    for line in ctx.execute([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"]).stderr.split("\n"):
        if "TOP=" in line:
            return str(ctx.path(line.split("TOP=")[1].strip()))
    return None

def _cuda_linkopts(ctx, toolkit):
    for directory in ["lib64", "lib", "targets/x86_64-linux/lib"]:
        archive = ctx.path("%s/%s/libcudart_static.a" % (toolkit, directory))
        if archive.exists:
            return [str(archive), "-ldl", "-lrt", "-lpthread"]
    fail("%s has no libcudart_static.a" % toolkit)

def _local_deps(ctx):
    python = _python(ctx)
    probe = ctx.execute([python, "-c", _PROBE])
    if probe.return_code:
        fail("%s lacks jaxlib, nanobind or pybind11; `make test` installs them in .venv, and " % python +
             "VIRTUAL_ENV or JAX_MOE_LB_PYTHON says where to look:\n" + probe.stderr)
    interpreter, python_headers, xla_ffi, nanobind, pybind11 = probe.stdout.strip().split("\n")
    ctx.symlink(python_headers, "python")
    ctx.symlink(xla_ffi, "xla_ffi")
    ctx.symlink(nanobind, "nanobind")
    ctx.symlink(pybind11, "pybind11")
    toolkit = _cuda_toolkit(ctx)
    if toolkit:
        ctx.symlink(toolkit + "/include", "cuda")
    linkopts = _cuda_linkopts(ctx, toolkit) if toolkit else []
    ctx.file("BUILD", _BUILD.replace("{python}", interpreter).replace("{cuda_linkopts}", repr(linkopts)))

local_deps = repository_rule(
    implementation = _local_deps,
    configure = True,
    environ = ["JAX_MOE_LB_PYTHON", "VIRTUAL_ENV", "PATH"],
    local = True,
)
