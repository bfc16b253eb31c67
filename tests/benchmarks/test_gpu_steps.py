"""Sizes of the training steps that `make gpu` measures."""

import pytest

from benchmarks.gpu.steps import CASES, TINY


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_the_sizes_of_its_model(name):
    decoder = CASES[name].decoder
    assert decoder.num_layers == CASES[name].layers
    assert CASES[name].ideal_flops > 0


def test_the_small_model_has_the_attention_kernel_of_the_large_one():
    small, large = TINY.decoder, CASES["qwen3"].decoder
    assert (small.latent is None, small.sinks, small.window(0)) == (large.latent is None, large.sinks, large.window(0))
