"""Parsing of XLA's text: shapes, instructions, computations and Python lines."""

import jax.numpy as jnp
import pytest

from jax_moe_lb.aot.hlo import ArrayShape, parse_module, parse_shapes, read_sources
from tests.aot import programs

SHAPES = {
    "f32[]": ((ArrayShape("f32", ()),), 4),
    "bf16[16,2048]{1,0:T(8,128)(2,1)S(1)}": ((ArrayShape("bf16", (16, 2048), 1),), 2 * 16 * 2048),
    "(s32[2]{0}, (pred[3]{0}, /*index=5*/u8[4]{0}), token[])": (
        (ArrayShape("s32", (2,)), ArrayShape("pred", (3,)), ArrayShape("u8", (4,))),
        8 + 3 + 4,
    ),
    "f8e4m3fn[8]{0}": ((ArrayShape("f8e4m3fn", (8,)),), 8),
    "s4[<=3]{0}": ((ArrayShape("s4", (3,)),), 2),
}


@pytest.mark.parametrize("text", SHAPES)
def test_shapes(text):
    shapes, nbytes = SHAPES[text]
    found = parse_shapes(text)
    assert (found, sum(shape.nbytes for shape in found)) == (shapes, nbytes)
    assert parse_shapes(" ".join(map(str, found))) == tuple(ArrayShape(one.dtype, one.dims) for one in shapes)


def test_every_instruction_of_a_program_is_read(exchanging):
    text, module = exchanging.compiled.as_text(), exchanging.module
    found = [one for part in module.computations.values() for one in part]
    assert len(found) == text.count(" = ")
    assert sum(one.is_root for one in found) == len(module.computations)
    # Every operand is an instruction of the same computation.
    for part in module.computations.values():
        for one in part:
            assert len(part.operands(one)) == len(one.operands), one.name


def test_a_loop_is_read(exchanging):
    module = exchanging.module
    (loop,) = (one for part in module.computations.values() for one in part if one.opcode == "while")
    assert loop.trips == 5
    assert {part.name for part in module.called(loop)} <= module.computations.keys()
    assert [len(part.parameters) for part in module.called(loop)] == [1, 1]


def test_lines_are_those_of_the_function_that_was_traced(exchanging):
    module = exchanging.module
    lines = {one.opcode: module.source(one) for one in module.computations[module.entry]}
    first = programs.exchange_in_all_ways.__code__.co_firstlineno
    for line, name in enumerate(("all-reduce", "all-gather", "all-to-all", "collective-permute", "while"), first + 2):
        assert lines[name] == f"tests/aot/programs.py:{line}"


FRAMES = """
FileNames
1 "/project/train.py"
2 "/venv/lib/python3.13/site-packages/jax_moe_lb/core/split.py"
3 "/venv/lib/python3.13/site-packages/jax_moe_lb/core/types.py"
4 "/venv/lib/python3.13/site-packages/tokamax/kernel.py"
5 "/venv/lib/python3.13/site-packages/jax_moe_lb/aot/compile.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=1}
2 {file_name_id=2 function_name_id=1 line=20 end_line=20 column=1 end_column=1}
3 {file_name_id=3 function_name_id=1 line=30 end_line=30 column=1 end_column=1}
4 {file_name_id=4 function_name_id=1 line=40 end_line=40 column=1 end_column=1}
5 {file_name_id=5 function_name_id=1 line=50 end_line=50 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=4 parent_frame_id=1}
6 {file_location_id=5 parent_frame_id=1}
"""


@pytest.mark.parametrize(
    ("frame", "line"),
    [
        (1, "/project/train.py:10"),
        (2, "jax_moe_lb/core/split.py:20"),
        # Lines of a helper and of another package are less specific than their caller's.
        (3, "jax_moe_lb/core/split.py:20"),
        (4, "jax_moe_lb/core/split.py:20"),
        # No caller in our package.
        (5, "tokamax/kernel.py:40"),
        # All programs are traced at this line.
        (6, ""),
        (7, ""),
    ],
)
def test_the_line_that_tells_most_is_found(frame, line):
    assert read_sources(FRAMES).line(f'metadata={{op_name="f" stack_frame_id={frame}}}') == line


def test_a_fusion_without_a_name_is_called_like_what_it_does():
    module = parse_module("""
%inside (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %sin = f32[4]{0} sine(%p), metadata={op_name="jit(f)/while/body/sin" source_file="/a/b.py" source_line=7}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %fusion = f32[4]{0} fusion(%x), kind=kLoop, calls=%inside
}
""")
    root = module.computations["main"].root
    assert module.op_name(root) == "while/body/sin"
    assert module.op_name(module.computations["main"].parameters[0]) == "parameter"


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="starts with 'not a program'; expected HLO text with an ENTRY"):
        parse_module("not a program")


def test_attributes_are_read():
    text = """
ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  ROOT %call = f32[4,4]{1,0} custom-call(%x, %x), custom_call_target="a \\"b\\"", lhs_contracting_dims={1,0}
}
"""
    call = parse_module(text).computations["main"].root
    assert call.target == 'a \\"b\\"'
    assert call.numbers("lhs_contracting_dims") == (1, 0)
    assert call.numbers("absent") == ()
    assert call.nbytes == jnp.zeros((4, 4), jnp.float32).nbytes


def test_metadata_in_several_lines_does_not_end_a_computation():
    """XLA prints the metadata of TPU kernels so."""
    text = """HloModule one

ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  %kernel = f32[2] custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\\\"block_q\\\\": 512}"
}}, metadata={op_name="splash"}
  ROOT %out = f32[2] negate(%kernel)
}
"""
    module = parse_module(text)
    entry = module.computations["main"]
    assert [one.name for one in entry] == ["p", "kernel", "out"]
    assert entry.root.name == "out"
    assert module.op_name(entry.instructions["kernel"]) == "splash"
