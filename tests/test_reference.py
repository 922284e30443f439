"""The oracle itself, against answers worked out by hand."""

import numpy as np
import pytest

import reference


def test_indexed_adds_in_flat_order_from_positive_zero():
    big = np.float32(2**24)
    grad = np.float32([[[big, 1, -big]]])
    assert reference.indexed(grad, (1, 1, 2), np.zeros((1, 1, 3), int), 2).tolist() == [[[0.0, 0.0]]]
    grad = np.float32([[[big, -big, 1]]])
    assert reference.indexed(grad, (1, 1, 2), np.zeros((1, 1, 3), int), 2).tolist() == [[[1.0, 0.0]]]
    assert not np.signbit(reference.indexed(np.float32([[[-0.0]]]), (1, 1, 1), np.zeros((1, 1, 1), int), 2)).any()


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation", "ceil_mode", "expected"),
    [
        (7, 3, 2, 0, 1, False, 3),
        (8, 3, 2, 0, 1, False, 3),
        (8, 3, 2, 0, 1, True, 4),
        (6, 1, 2, 0, 1, True, 3),
        (7, 1, 2, 0, 1, True, 4),
        (32, 1, 2, 0, 1, True, 16),
        (1, 4, 1, 0, 1, False, 0),
        (3, 4, 4, 0, 1, True, 1),
        (13, 3, 2, 1, 2, False, 6),
    ],
)
def test_pooled_size(size, kernel, stride, padding, dilation, ceil_mode, expected):
    assert reference.pooled_size(size, kernel, stride, padding, dilation, ceil_mode) == expected


def test_adaptive_windows_overlap_and_cover():
    assert [reference.adaptive_window(o, 5, 3) for o in range(3)] == [(0, 2), (1, 4), (3, 5)]
    assert [reference.adaptive_window(o, 2, 3) for o in range(3)] == [(0, 1), (0, 2), (1, 2)]


def test_averaged_counts_padding_but_not_the_overhang():
    ones = np.ones((1, 1, 1, 2), np.float32)
    got = reference.averaged(ones, (1, 1, 1, 5), (1, 1, 3), ceil_mode=True)
    assert got.ravel().tolist() == [np.float32(1 / 3)] * 3 + [0.5] * 2


def test_the_bound_is_one_that_a_wrong_result_breaks():
    grad, indices = np.float32([[[0.1, 0.2, 0.3]]]), np.zeros((1, 1, 3), int)
    right = reference.indexed(grad, (1, 1, 2), indices, 2)
    name = "adaptive_max_pool2d_backward"
    assert reference.within_bound(right, name, grad, (1, 1, 2), indices)
    assert not reference.within_bound(right * np.float32(1.000001), name, grad, (1, 1, 2), indices)
    assert not reference.within_bound(right + np.float32([0, 1e-30]), name, grad, (1, 1, 2), indices)


def test_first_maximum_in_row_major_order():
    assert reference.max_pool_indices(np.zeros((1, 4, 4)), 2).ravel().tolist() == [0, 2, 8, 10]
    assert reference.adaptive_max_pool_indices(np.float32([[[0, 9, 0, 8, 0]]]), (1, 3)).ravel().tolist() == [1, 1, 3]
