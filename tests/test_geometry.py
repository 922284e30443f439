"""Integer arithmetic of windows, against counting them one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from poolgrad_numba import geometry


@settings(max_examples=1000)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.data())
def test_pooled_size(size, kernel, stride, dilation, ceil_mode, data):
    padding = data.draw(st.integers(0, geometry.effective_kernel(kernel, dilation) // 2))
    want = reference.pooled_size(size, kernel, stride, padding, dilation, ceil_mode)
    got = geometry.pooled_size(size, kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    assert max(got, 0) == want


@settings(max_examples=500)
@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_adaptive_window(size, outputs, data):
    o = data.draw(st.integers(0, outputs - 1))
    assert geometry.adaptive_window(o, size, outputs) == reference.adaptive_window(o, size, outputs)


@pytest.mark.parametrize("o", [0, 10**17, 3 * 10**17 - 1])
def test_no_float_comes_near(o):
    size = 3 * 10**17
    assert geometry.adaptive_window(o, size, size) == (o, o + 1)
    assert geometry.pooled_size(size, 3, 1, 1, ceil_mode=False) == size
