"""Extension modules and C++ tests, with the compiler flags of CMakeLists.txt."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

COPTS = [
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wsign-conversion",
    "-Werror",
    "-Wno-unknown-warning-option",
    "-Wno-maybe-uninitialized",
]

ONLY_WITH_CUDA = select({
    "//:cuda": [],
    "//conditions:default": ["//:never"],
})

def moe_lb_library(name, **kwargs):
    # Linked statically everywhere, as the symbols are hidden.
    cc_library(name = name, copts = COPTS, linkstatic = True, **kwargs)

def moe_lb_tests(srcs, deps, args = []):
    """A test for each file, named after it; all with the same arguments."""
    for src in srcs:
        cc_test(
            name = src.split("/")[-1][:-len(".cc")],
            size = "medium",
            srcs = [src],
            args = args,
            copts = COPTS,
            linkstatic = True,
            deps = deps,
        )

def extension_module(name, srcs, deps, **kwargs):
    """The shared library `<name>.so`, which Python imports as `<name>`."""
    cc_binary(
        name = name + ".so",
        srcs = srcs,
        copts = COPTS,
        linkopts = ["-Wl,--gc-sections", "-Wl,-s"],
        linkshared = True,
        linkstatic = True,
        deps = deps,
        **kwargs
    )
