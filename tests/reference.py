"""The oracle: naive NumPy, written from the definitions, sharing no code with the library.

Every function works on planes: (N*C, spatial...). Loops run over outputs in flat order, so sums come about in
canonical order; only the planes are vectorised.
"""

import itertools

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def accumulation_type(dtype):
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def as_axes(value, axes):
    return (value,) * axes if np.ndim(value) == 0 else tuple(value) * (axes // len(value))


# -- windows -----------------------------------------------------------------------------------------------------


def pooled_size(size, kernel, stride, padding, dilation, ceil_mode):
    """Count the windows one by one: those that fit, and with ceil_mode one that hangs over but starts inside."""
    last_cell = dilation * (kernel - 1)
    count = 0
    while True:
        start = count * stride - padding
        fits = start + last_cell < size + padding
        if ceil_mode and not fits:
            before = start - stride + last_cell  # the window before this one leaves cells at the end uncovered
            fits = count > 0 and before < size + padding - 1 and start < size
            if count == 0:  # the very first window may already hang over, by less than a stride
                fits = start + last_cell - (stride - 1) < size + padding
        if not fits:
            return count
        count += 1


def adaptive_window(o, size, outputs):
    cells = [i for i in range(size) if (i + 1) * outputs > o * size and i * outputs < (o + 1) * size]
    return cells[0], cells[-1] + 1


# -- gradients ---------------------------------------------------------------------------------------------------


def indexed(grad, input_shape, indices, spatial, *, accumulate=None):
    """grad_input[plane, indices[plane, o]] += grad_output[plane, o], from +0.0, in flat order of o."""
    grad, indices = np.asarray(grad), np.asarray(indices)
    cells, planes = int(np.prod(input_shape[-spatial:])), int(np.prod(input_shape[:-spatial]))
    total = np.zeros((planes, cells), accumulate or accumulation_type(grad.dtype))
    terms = grad.reshape(planes, -1).astype(total.dtype)
    flat = indices.reshape(planes, -1)
    every = np.arange(planes)
    for o in range(terms.shape[1]):
        total[every, flat[:, o]] += terms[:, o]
    return total.reshape(input_shape).astype(grad.dtype if accumulate is None else accumulate)


def averaged(grad, input_shape, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
             divisor_override=None, *, spatial=3, accumulate=None):  # fmt: skip
    """grad_input[window(o)] += grad_output[o] / divisor(o), from +0.0, in flat order of o."""
    grad = np.asarray(grad)
    kernel = as_axes(kernel_size, spatial)
    stride = kernel if stride is None or np.size(stride) == 0 else as_axes(stride, spatial)
    padding = as_axes(padding, spatial)
    size = input_shape[-spatial:]
    total = np.zeros((int(np.prod(input_shape[:-spatial])), *size), accumulate or accumulation_type(grad.dtype))
    terms = grad.reshape(len(total), *grad.shape[-spatial:]).astype(total.dtype)
    for o in itertools.product(*map(range, grad.shape[-spatial:])):
        window, counted = [], 1
        for i, n, k, s, p in zip(o, size, kernel, stride, padding, strict=True):
            t0 = i * s - p
            t1 = min(t0 + k, n + p)
            b0, b1 = max(t0, 0), min(t1, n)
            counted *= t1 - t0 if count_include_pad else b1 - b0
            window.append(slice(b0, b1))
        divisor = total.dtype.type(counted if divisor_override is None else divisor_override)
        term = terms[(slice(None), *o)] / divisor
        total[(slice(None), *window)] += term.reshape(-1, *(1,) * spatial)
    return total.reshape(input_shape).astype(grad.dtype if accumulate is None else accumulate)


def apply(name, grad, input_shape, indices=None, *, accumulate=None, **parameters):
    """Run an operator by its public name."""
    spatial = int(name[name.index("d_") - 1])
    if indices is not None:
        return indexed(grad, input_shape, indices, spatial, accumulate=accumulate)
    return averaged(grad, input_shape, **parameters, spatial=spatial, accumulate=accumulate)


def within_bound(result, name, grad, input_shape, indices=None, **parameters):
    """Whether a result holds (n+1)*eps times the sum of the terms' magnitudes, and the final rounding."""
    wide = np.longdouble
    exact = apply(name, grad.astype(wide), input_shape, indices, accumulate=wide, **parameters)
    size = apply(name, np.abs(grad.astype(wide)), input_shape, indices, accumulate=wide, **_positive(parameters))
    ones = {**parameters, "divisor_override": 1} if indices is None else parameters
    count = apply(name, np.ones(grad.shape, wide), input_shape, indices, accumulate=wide, **ones)
    bound = (count + 1) * np.finfo(accumulation_type(grad.dtype)).eps * size
    if grad.dtype.itemsize == 2:
        info = ml_dtypes.finfo(grad.dtype)
        bound = bound + (np.abs(exact) + bound) * wide(info.eps) / 2 + wide(info.smallest_subnormal)
    return bool(np.all(np.abs(result.astype(wide) - exact) <= bound))


def _positive(parameters):
    divisor = parameters.get("divisor_override")
    return parameters if divisor is None else {**parameters, "divisor_override": abs(divisor)}


# -- forwards, to make indices that a real pooling makes -----------------------------------------------------------


def max_pool_indices(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
    """Flat index of each window's first maximum, or last NaN; x is (planes, spatial...)."""
    spatial = x.ndim - 1
    kernel, padding, dilation = (as_axes(v, spatial) for v in (kernel_size, padding, dilation))
    stride = kernel if stride is None else as_axes(stride, spatial)
    geometry = list(zip(x.shape[1:], kernel, stride, padding, dilation, strict=True))
    outputs = [pooled_size(n, k, s, p, d, ceil_mode) for n, k, s, p, d in geometry]
    windows = [
        [[i for i in range(o * s - p, o * s - p + d * (k - 1) + 1, d) if 0 <= i < n] for o in range(outputs[axis])]
        for axis, (n, k, s, p, d) in enumerate(geometry)
    ]
    return _first_maxima(x, windows)


def adaptive_max_pool_indices(x, output_size):
    windows = [
        [list(range(*adaptive_window(o, n, outputs))) for o in range(outputs)]
        for n, outputs in zip(x.shape[1:], output_size, strict=True)
    ]
    return _first_maxima(x, windows)


def _first_maxima(x, windows):
    """The first of equal maxima, but the last of NaN."""
    flat_index = np.arange(int(np.prod(x.shape[1:]))).reshape(x.shape[1:])
    result = np.empty((len(x), *map(len, windows)), np.int64)
    for o in itertools.product(*(range(len(axis)) for axis in windows)):
        cells = np.ix_(*(axis[i] for axis, i in zip(windows, o, strict=True)))
        values = x[(slice(None), *cells)].reshape(len(x), -1)
        for plane, window in enumerate(values):
            best = next((i for i in reversed(range(window.size)) if np.isnan(window[i])), window.argmax())
            result[(plane, *o)] = flat_index[cells].reshape(-1)[best]
    return result
