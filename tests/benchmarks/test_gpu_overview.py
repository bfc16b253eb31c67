"""Tables of documents from those of GPU checks."""

from benchmarks.gpu import tiles
from benchmarks.gpu.overview import PRODUCTS, overview
from benchmarks.render.results import Table


def row(kernel, tflops, skew="even"):
    return ["Mixtral-8x7B", "up", "product", 8192, 8192, skew, *kernel, 1.0, tflops, None, 1.0, None, ""]


def test_products_have_a_column_per_kernel():
    rows = [row(kernel, float(i)) for i, kernel in enumerate(PRODUCTS.values())]
    rows += [row(("another kernel", "128 x 64"), 9.0), row(PRODUCTS["default"], 9.0, "hot")]
    rows += [[*row(PRODUCTS["default"], 9.0)[:-1], "wrong: differs by 1"]]
    found = overview({"fastest-a-8192": Table(tiles.COLUMNS, rows), "gemm": Table({"": ""}, [["kept"]])})
    assert found["products"].rows == [["Mixtral-8x7B", "up", "product", 8192, 8192, 0.0, 1.0, 2.0, 3.0, 4.0]]
    assert set(found) == {"products", "gemm"}


def test_parts_are_sums_of_kernels():
    columns = dict.fromkeys(("skew", "system", "part", "kernel", "result", "executions", "ms"), "")
    rows = [["4", "exact", "products", kernel, "", 1.0, ms] for kernel, ms in {"a": 1.5, "b": 2.0}.items()]
    kernels = Table(columns, [*rows, ["even", "exact", "products", "a", "", 1.0, 9.0]])
    found = overview({"rank-kernels-a": kernels})
    assert found["rank-kernels-a"] == kernels
    assert found["parts"].rows == [["a", "exact", "products", 3.5]]


def test_the_slowest_kernels_of_each_system_are_kept():
    columns = dict.fromkeys(("skew", "system", "part", "kernel", "result", "executions", "ms"), "")
    rows = [["4", system, "p", f"k{i}", "", 1.0, 9.0 - i] for system in ("exact", "plain") for i in range(9)]
    whole = ["4", "exact", "whole call", "", "", None, 50.0]
    found = overview({"rank-kernels-a": Table(columns, [*rows, whole])})
    assert found["rank-kernels-a"].rows == [*rows[:6], *rows[9:15], whole]
    assert found["parts"].rows[0] == ["a", "exact", "p", 45.0]
