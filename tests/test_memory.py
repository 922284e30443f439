"""Large arrays' memory: taken again when nobody can see it any more, and never before."""

import mmap
import sys
import threading

import numpy as np
import pytest

import poolgrad_numba as pg
from poolgrad_numba import memory
from support import python

LEAST, MOST = 1 << 16, 1 << 20  # for these tests
BYTE = np.dtype(np.uint8)

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="nothing is kept here")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(memory, "_LEAST", LEAST)
    monkeypatch.setattr(memory, "_MOST", MOST)
    monkeypatch.setattr(memory, "_kept", [])


def place(array):
    return array.ctypes.data


def lease(size=LEAST):
    return memory.empty((size,), BYTE)


def test_an_array_is_as_numpy_makes_it():
    array = memory.empty((4, LEAST), np.dtype(np.float16))
    assert (type(array), array.shape, array.dtype) == (np.ndarray, (4, LEAST), np.float16)
    assert (array.flags.c_contiguous, array.flags.writeable, array.flags.aligned) == (True, True, True)
    assert place(array) % 64 == 0
    array[:] = 3
    assert array.sum(dtype=np.float64) == 12 * LEAST


def test_memory_is_taken_again():
    array = lease()
    there = place(array)
    array[:] = 1
    del array
    assert place(lease()) == there


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[5:],
        lambda array: array.reshape(2, -1).T[::-1, 1],
        lambda array: array.view(np.int16)[7:],
        lambda array: array.base[3:],
        memoryview,
        lambda array: np.frombuffer(array, np.int32),
        lambda array: np.lib.stride_tricks.as_strided(array, (3,), (2,)),
        np.asfortranarray,
        lambda array: array.view(np.recarray),
    ],
)
def test_a_view_keeps_its_memory(view):
    array = lease()
    array[:] = 7
    there = place(array)
    seen = view(array)
    del array
    others = [lease() for _ in range(3)]
    for other in others:
        assert place(other) != there
        other[:] = 0
    assert set(np.asarray(seen).view(np.uint8).ravel().tolist()) == {7}
    del seen
    assert place(lease()) == there


def test_memory_serves_sizes_a_little_smaller_only():
    sizes = LEAST * 2, LEAST * 2 - LEAST // 8, LEAST, LEAST * 2 + 1
    array = lease(sizes[0])
    there = place(array)
    del array
    for size, same in zip(sizes[1:], (True, False, False), strict=True):
        array = lease(size)
        assert (place(array) == there) == same, size
        del array


@pytest.mark.parametrize("size", [0, 1, LEAST - 1, MOST + 1])
def test_small_and_huge_arrays_are_numpys_own(size):
    assert lease(size).flags.owndata
    assert not memory._kept


def test_no_more_is_kept_than_the_limit():
    arrays = [lease() for _ in range(2 * MOST // LEAST)]
    newest = place(arrays[-1])
    while arrays:
        del arrays[0]
        assert sum(map(len, memory._kept)) <= MOST
    assert len(memory._kept) == MOST // LEAST
    assert place(lease()) == newest


def test_where_memory_cannot_be_marked_free_none_is_kept(monkeypatch):
    array = lease()
    monkeypatch.setattr(memory, "_MARK_FREE", 12345)  # as a kernel that does not know it
    del array
    assert not memory._kept
    monkeypatch.setattr(memory, "_MARK_FREE", None)
    assert lease().flags.owndata


def test_out_of_memory_is_numpys_error(monkeypatch):
    monkeypatch.setattr(memory, "_MOST", 1 << 62)
    with pytest.raises(MemoryError, match="Unable to allocate"):
        lease(1 << 60)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_system_may_take_back_what_is_kept():
    python("""
import numpy as np
from poolgrad_numba import memory
def lazily_free():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("LazyFree"))
array = memory.empty((2**26,), np.dtype(np.uint8))
array[:] = 1
before = lazily_free()
del array
assert lazily_free() - before >= 2**26 // 1024 * 0.9, (before, lazily_free())
array = memory.empty((2**26,), np.dtype(np.uint8))
array[:] = 2
assert lazily_free() <= before and (array == 2).all()
""")


def test_threads_never_share_memory():
    failures = []

    def work(name):
        rng = np.random.default_rng(name)
        for _ in range(300):
            array = lease(int(rng.integers(LEAST, 3 * LEAST)))
            array[:] = name
            if (array != name).any():
                failures.append(name)
            del array

    threads = [threading.Thread(target=work, args=(name,)) for name in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(map(len, memory._kept)) <= MOST


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_writes_its_own_copy():
    python("""
import os
import numpy as np
from poolgrad_numba import memory
size = (2**25,), np.dtype(np.uint8)
held, kept = memory.empty(*size), memory.empty(*size)
held[:] = kept[:] = 1
there = kept.ctypes.data
del kept
child = os.fork()
if not child:
    again = memory.empty(*size)
    assert again.ctypes.data == there
    held[:] = again[:] = 2
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
again = memory.empty(*size)
assert again.ctypes.data == there and (held == 1).all() and not (again == 2).any()
""")


def test_results_and_scratch_use_it(monkeypatch):
    shape = (2, 8, 64, 65)
    plan = pg.make_plan("max_pool2d_with_indices_backward", input_shape=shape, kernel_size=2)
    grad, indices = np.ones(plan.output_shape, np.float32), np.zeros(plan.output_shape, np.int64)
    first = plan.run(grad, indices)
    there, kept = place(first), first.copy()
    second = plan.run(2 * grad, indices)
    assert place(second) != there
    assert (first == kept).all()
    del first
    third = plan.run(grad, indices)
    assert place(third) == there
    assert third.tobytes() == kept.tobytes(), "every cell is written, also over an older result"
    monkeypatch.setattr(memory, "_kept", [])
    plan.run(np.asfortranarray(grad), np.asfortranarray(indices), out=third)
    (scratch,) = memory._kept
    assert len(scratch) >= grad.nbytes + indices.nbytes
