"""Calls of the fuzz: a `Recipe`, and the call that follows from it."""

import math
import random
import tempfile
from typing import NamedTuple

import numpy as np

import poolgrad_numba as pg
import reference
from faults import FAULTS
from guarded import Guarded
from support import algorithms
from test_hostile import Hostile

LAYOUTS = ("C", "Fortran", "permuted", "sliced", "reversed", "unaligned", "packed", "swapped")
OUT_LAYOUTS = (*LAYOUTS, "interleaved")
SHARED_LAYOUTS = ("broadcast", "overlapping")  # for inputs only
KINDS = ("array", "subclass", "memmap", "read-only", "list", "interface", "memoryview")
OUT_KINDS = ("array", "subclass", "memmap")


class Recipe(NamedTuple):
    """One try; everything follows from it."""

    operator: str
    planes: tuple  # (N, C), N is None for no batch axis
    cells: int  # at most, of a plane
    axes: list  # per axis (size, kernel or outputs, stride, padding, dilation), each reduced to what is legal
    options: int  # bits: ceil_mode, count_include_pad; beyond: divisor_override
    dtypes: tuple  # of values and indices
    values: str  # integers, rough or bits
    grad: tuple  # layout, kind
    indices: tuple  # layout, kind, real or wild
    out: tuple  # layout, kind; layout None: no out
    deterministic: bool | None
    threads: int | None
    candidate: int | None  # None: the public function; 0: planned; beyond: planned with that candidate
    workspace: str
    faults: list
    seed: int


class Call:
    """One call under way: what will be passed, and what it must come to. Faults change the former."""

    def __init__(self, recipe):
        self.recipe, self.rng, self.name = recipe, random.Random(recipe.seed), recipe.operator
        self.signature = pg.OPS[recipe.operator].signature
        self.planned = recipe.candidate is not None
        self.settings = {"deterministic": recipe.deterministic, "num_threads": recipe.threads}
        self.dtype, self.index_dtype = np.dtype(recipe.dtypes[0]), None
        names = algorithms(self.name, deterministic=bool(recipe.deterministic))
        self.algorithm = names[recipe.candidate % len(names)] if recipe.candidate else None
        self.workspace = self.fit_workspace
        self.arrays, self.guards, self.errors, self.wrapped = {}, {}, {}, set()
        self.set_geometry()
        self.set_arrays()
        groups = set()
        for name in recipe.faults:
            spoil, error, group, _ = FAULTS[name]
            if group not in groups and spoil(self) is not False:
                self.errors[name] = error
                groups.add(group)
        self.wrap()

    # What is true of the legal call; the parameters as they are passed are spelled in some legal way.

    def set_geometry(self):
        recipe, signature = self.recipe, self.signature
        sizes, windows, room = [], [], recipe.cells
        self.dilation = (1,) * signature.spatial
        long = bool(recipe.options & 4)  # a long last axis, so that blocks and tiles split rows
        for size, *_ in recipe.axes:
            leading = len(sizes) + 1 < signature.spatial
            least = 2 if long else max(math.isqrt(room), 2)
            sizes.append(1 + size * (1 + room // 256) % (least if leading else room))
            room = max(room // sizes[-1], 1)
        self.size = tuple(sizes)
        planes = tuple(n for n in recipe.planes if n is not None)
        self.shape = planes + self.size
        self.input_shape = self.spell(self.shape)
        most = min(math.ceil(recipe.cells ** (1 / signature.spatial)) + 2, 40)
        if signature.adaptive:
            windows = [outputs % most + (stride > 9) for (_, outputs, stride, *_) in recipe.axes]
            self.window, self.outputs = {}, tuple(windows)
            self.parameters = {"output_size": self.spell(self.outputs)} if self.planned else {}
        else:
            for size, axis in zip(sizes, recipe.axes, strict=True):
                many = recipe.cells if long and len(windows) + 1 == signature.spatial else most
                windows.append(self.legal_window(size, many, *axis[1:]))
            self.set_window(*zip(*windows, strict=True))
        self.output_shape = planes + self.outputs

    def legal_window(self, size, most, kernel, stride, padding, dilation):
        d = 1 + dilation % 3 if "dilation" in self.signature.parameters else 1
        k = 1 + kernel % min(size + 2, 9 if kernel < 250 else 64)
        eff = d * (k - 1) + 1
        p = max(padding % (eff // 2 + 1) if padding > 64 else 0, -((size - eff) // 2) if eff > size else 0)
        return k, max(1 + stride % 5, size // most), p, d

    def set_window(self, kernel, stride, padding, dilation):
        options, self.dilation = self.recipe.options, dilation
        if options % 8 > 5:
            stride = kernel
        divisors = (None, None, 1, -2, 4, 3, -7, 2**40)
        self.window = {
            "kernel_size": kernel,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "ceil_mode": bool(options & 1),
            "count_include_pad": bool(options & 2),
            "divisor_override": divisors[options // 16 % len(divisors)],
        }
        self.window = {name: self.window[name] for name in self.signature.parameters}
        ceil = self.window.get("ceil_mode", False)
        axes = zip(self.size, kernel, stride, padding, dilation, strict=True)
        self.outputs = tuple(reference.pooled_size(*axis, ceil) for axis in axes)
        self.parameters = {
            name: self.spell(value) if isinstance(value, tuple) else value for name, value in self.window.items()
        }
        if stride == kernel and "stride" in self.parameters and self.rng.random() < 0.7:
            self.parameters["stride"] = self.rng.choice([None, (), [], np.array([], np.int64)])
        if "divisor_override" in self.parameters and self.window["divisor_override"] is not None:
            self.parameters["divisor_override"] = self.rng.choice([int, np.int64])(self.window["divisor_override"])

    def spell(self, numbers):
        """The same integers in another legal form."""
        kinds = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]
        kind = self.rng.choice(kinds if max(numbers) < 128 else kinds[5:])
        forms = [numbers, list(numbers), np.array(numbers, kind), [kind(n) for n in numbers], iter(numbers)]
        if len(set(numbers)) == 1 and numbers is not self.shape:
            forms += [numbers[0], kind(numbers[0]), [numbers[0]], np.array(numbers[0], kind)]
        return self.rng.choice(forms)

    def set_arrays(self):
        recipe = self.recipe
        content = np.random.default_rng(recipe.seed)
        self.put("grad_output", recipe.grad[0], self.output_shape, self.dtype, self.contents(content))
        if self.signature.indexed:
            self.index_dtype = np.dtype(recipe.dtypes[1])
            indices = self.index_values(content)
            self.put("indices", recipe.indices[0], self.output_shape, self.index_dtype, indices)
        if recipe.out[0]:
            self.put("out", recipe.out[0], self.shape, self.dtype, None)
        if recipe.out[0] == "interleaved":
            self.interleave()

    def contents(self, content):
        shape, values = self.output_shape, self.recipe.values
        if values == "bits" and self.exact_order():
            raw = content.integers(0, 256, (*shape, self.dtype.itemsize), np.uint8)
            return raw.view(self.dtype).reshape(shape)
        small = content.integers(-4, 5, shape)
        if values == "integers":
            return small.astype(self.dtype)
        return (content.standard_normal(shape) * 2.0**small).astype(self.dtype)

    def exact_order(self):
        return self.recipe.deterministic is True

    def index_values(self, content):
        cells, how, shape = math.prod(self.size), self.recipe.indices[2], self.output_shape
        if how == "one":
            return np.full(shape, content.integers(0, cells))
        gaps = max(self.dilation) > 1 and max(self.window["padding"]) > 0  # a window may then have no cell at all
        if how == "wild" or gaps or max(cells, math.prod(self.outputs)) > 60 or not math.prod(shape):
            return content.integers(0, cells, shape)
        x = content.integers(0, 9, (math.prod(self.shape[: -self.signature.spatial]), *self.size))
        if self.signature.adaptive:
            return reference.adaptive_max_pool_indices(x, self.outputs).reshape(shape)
        return reference.max_pool_indices(x, **self.window).reshape(shape)

    # Arrays in memory.

    def put(self, name, layout, shape, dtype, values):
        """Make an array in guarded memory, in some layout."""
        if layout == "swapped" and dtype != reference.BFLOAT16:
            dtype = dtype.newbyteorder()
        strides = self.strides(layout, shape, dtype.itemsize)
        low = sum(min(stride * (n - 1), 0) for stride, n in zip(strides, shape, strict=True))
        reach = sum(abs(stride) * (n - 1) for stride, n in zip(strides, shape, strict=True)) + dtype.itemsize
        gap = self.rng.randrange(1, 64) if layout == "unaligned" else 0
        guard = Guarded(reach if 0 not in shape else 0, right=self.rng.random() < 0.6, gap=gap)
        array = guard.array(shape, dtype, strides, -low if 0 not in shape else 0)
        if values is not None:
            array[...] = values
        self.arrays[name], self.guards[name] = array, guard

    def interleave(self):
        """Let cells of ``out`` and of the gradient alternate; no byte is shared, so that this is legal."""
        size, gradient = self.dtype.itemsize, self.arrays["grad_output"]
        guard = Guarded(2 * size * max(math.prod(self.shape), gradient.size))
        for name, offset, shape in (("out", 0, self.shape), ("grad_output", size, self.output_shape)):
            strides = [2 * stride for stride in self.strides("C", shape, size)]
            self.arrays[name] = guard.array(shape, self.dtype, strides, 0 if 0 in shape else offset)
        self.arrays["grad_output"][...] = gradient
        self.guards["out"] = guard  # where it also shows whether the gradient is intact
        del self.guards["grad_output"]

    def strides(self, layout, shape, itemsize):
        order = list(range(len(shape)))
        if layout == "Fortran":
            order.reverse()
        elif layout in ("permuted", "sliced"):
            self.rng.shuffle(order)
        strides, stride = [0] * len(shape), itemsize + (layout == "packed")
        for axis in reversed(order):
            stride *= self.rng.choice((1, 2, 3)) if layout == "sliced" else 1
            strides[axis] = stride
            stride *= max(shape[axis], 1)
        if layout in ("reversed", *SHARED_LAYOUTS):
            for axis in order:
                other = {"reversed": -strides[axis], "broadcast": 0, "overlapping": itemsize}[layout]
                strides[axis] = self.rng.choice((strides[axis], other))
        return strides

    def plain(self, name):
        """The array that a fault may spoil."""
        array = self.arrays.get(name)
        return array if type(array) is np.ndarray and name not in self.wrapped else None

    def replace(self, name, array, guard=None):
        """Pass something else, as it is."""
        self.arrays[name] = array
        self.guards.pop(name, None)
        if guard is not None:
            self.guards[name] = guard
        self.wrapped.add(name)

    def wrap(self):
        """Dress arrays in other legal types, and make inputs fatal to write."""
        for name in self.arrays:
            if self.plain(name) is None:
                continue
            kind = getattr(self.recipe, name.removesuffix("_output"))[1]
            other = self.dress(kind, self.arrays[name])
            if kind in ("memmap", "list") and other is not self.arrays[name]:
                self.guards.pop(name, None)
            self.arrays[name] = other
            if name != "out" and name in self.guards and self.rng.random() < 0.8:
                self.guards[name].freeze()

    def dress(self, kind, array):
        if kind == "subclass":
            return array.view(Hostile)
        if kind == "memmap" and array.size:
            with tempfile.TemporaryFile() as file:
                other = np.memmap(file, array.dtype, "w+", self.rng.choice((0, 1, 64)), array.shape)
            other[...] = array
            return other
        if kind == "read-only":
            array.flags.writeable = False
        if kind == "list":
            other = np.asarray(array.tolist())
            return array.tolist() if (other.dtype, other.shape) == (array.dtype, array.shape) else array
        if kind == "interface":
            return Interface(array)
        if kind == "memoryview" and array.dtype.kind in "fi" and array.size:
            return memoryview(array)
        return array

    # The call itself.

    def fit_workspace(self, size):
        kind = self.recipe.workspace
        if kind == "none":
            return None
        guard = Guarded(size + (kind == "roomy") * self.rng.choice((1, 64, 1000)), gap=self.rng.choice((0, 0, 1, 32)))
        self.guards["workspace"] = guard
        return guard.payload if self.rng.random() < 0.5 else memoryview(guard.payload)

    def spoil_workspace(self, make):
        if not self.planned:
            return False
        self.workspace = make
        return None

    def run(self):
        if not self.planned:
            function = getattr(pg, self.name)
            return function(input_shape=self.input_shape, **self.arrays, **self.parameters, **self.settings)
        plan = pg.make_plan(
            self.name,
            input_shape=self.input_shape,
            dtype=self.dtype,
            index_dtype=self.index_dtype,
            algorithm=self.algorithm,
            **self.settings,
            **self.parameters,
        )
        grad, indices, out = (self.arrays.get(name) for name in ("grad_output", "indices", "out"))
        size = plan.workspace_size_for(grad, indices, out)
        workspace = self.workspace(size)
        if workspace is None:
            self.errors.pop("workspace_too_small", None)
        result = plan.run(grad, indices, out=out, workspace=workspace)
        assert plan.output_shape == self.output_shape
        assert self.algorithm in (None, plan.algorithm)
        return result


class Interface:
    """An array to those who ask."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array
