"""The names that BUILD files and Bazel's own repositories load from rules_cc, as the native rules.

Continuous integration builds with Debian's Bazel 4 (ci/bazel.sh), which would otherwise download rules_cc. The last two
make no target: nothing here depends on one that they would make.
"""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
fdo_prefetch_hints = native.fdo_prefetch_hints
fdo_profile = native.fdo_profile
objc_import = native.objc_import
objc_library = native.objc_library

def cc_flags_supplier(name, **kwargs):
    pass

def compiler_flag(name, **kwargs):
    pass
