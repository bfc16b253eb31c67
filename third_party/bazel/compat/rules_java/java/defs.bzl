"""The names that Bazel's own repositories load from rules_java, as the native rules.

Continuous integration builds with Debian's Bazel 4 (ci/bazel.sh), which would otherwise download rules_java.
"""

java_binary = native.java_binary
java_import = native.java_import
java_library = native.java_library
java_package_configuration = native.java_package_configuration
java_plugin = native.java_plugin
java_runtime = native.java_runtime
java_test = native.java_test
java_toolchain = native.java_toolchain
