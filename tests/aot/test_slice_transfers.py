"""Transfers between TPU slices, in the form that libtpu writes them."""

import pytest

from jax_moe_lb.aot.execution_counts import answers_from_host
from jax_moe_lb.aot.memory import MemoryTraffic
from jax_moe_lb.aot.slice_transfers import transfers_between_slices
from tests.aot.programs import module_of

PROGRAM = """
ENTRY %main (x: f32[1024,1024], n: s32[32]) -> f32[1024,1024] {
  %token = token[] after-all()
  %send = (f32[1024,1024]{1,0}, u32[], token[]) send(%x, %token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="a_0",_xla_megascale_ragged_operand_index="0",_xla_megascale_target={TARGET},_xla_megascale_transfer_type="RAGGED_ALL_TO_ALL"}
  %send.list = (s32[32]{0}, u32[], token[]) send(%n, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="a_0",_xla_megascale_ragged_operand_index="2",_xla_megascale_target={TARGET},_xla_megascale_transfer_type="RAGGED_ALL_TO_ALL"}
  %recv = (f32[1024,1024]{1,0}, u32[], token[]) recv(%token), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="a_0",_xla_megascale_target={TARGET},_xla_megascale_transfer_type="RAGGED_ALL_TO_ALL"}
  %late = (f32[1024,1024]{1,0}, u32[], token[]) send(%x, %token), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="b_0",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %large = f32[1024,1024]{1,0} sine(%x)
  %recv.done = (f32[1024,1024]{1,0}, token[]) recv-done(%recv), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %answer = (f32[1024,1024]{1,0}, u32[], token[]) recv(%token), channel_id=5, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="callback"}
  %answer.done = (f32[1024,1024]{1,0}, token[]) recv-done(%answer), channel_id=5, is_host_transfer=true
  ROOT %out = f32[1024,1024]{1,0} get-tuple-element(%recv.done), index=0
}
"""  # noqa: E501 (XLA's lines)

EACH_WITH_ITS_PEER = "{{100000,200000},{100001,200001}}"
ALL_WITH_ALL = "{{100000,100001,200000,200001}}"
AXES = {EACH_WITH_ITS_PEER: ("node",), ALL_WITH_ALL: ("node", "expert"), '"{1,2}x{0:7}"': ("node",)}


@pytest.mark.parametrize(("target", "axes"), AXES.items())
def test_transfers_have_axes_bytes_and_overlapping_work(target, axes):
    module = module_of(PROGRAM.replace("{TARGET}", target))
    (found,) = transfers_between_slices(module, ("node", "expert"), ("node",), MemoryTraffic(module).nbytes)
    assert (found.kind, found.axes, found.count) == ("ragged-all-to-all between slices", axes, 1)
    # Another transfer hides none of it.
    assert (found.nbytes, found.asynchronous, found.over) == (4 * 1024 * 1024, 1, ("large",))


def test_a_transfer_between_slices_is_no_answer_of_a_callback():
    assert answers_from_host(module_of(PROGRAM.replace("{TARGET}", ALL_WITH_ALL))) == 1
