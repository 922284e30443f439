"""How kernels are compiled and cached: the only place with Numba options.

No ``fastmath`` anywhere: both modes need NaN and infinities, one needs the order of additions.
"""

import contextlib
import hashlib
import os
import pickle
import pkgutil
import sys
import threading
import warnings
from importlib.util import find_spec

import numba
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from poolgrad_numba.kernels.numeric import enter_ieee_mode, leave_ieee_mode

# nogil: other Python threads (streams, data loaders) go on while a kernel runs.
_OPTIONS = {"error_model": "numpy", "nogil": True, "boundscheck": False, "fastmath": False}

# No reference counts (_nrt): each slice of an array would be counted by calls through pointers, atomically, which took
# half of the time of kernels that work row by row. So a helper may return no array that it has not been given.
_INNER = {**_OPTIONS, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
helper = njit(**_INNER)


KERNELS = []  # all that there are
_making = threading.RLock()  # held while a dispatcher is made, so that threads calling at once make one
_LOCKS = (_making, global_compiler_lock)


def _hold_locks():
    for lock in _LOCKS:
        lock.acquire()


def _release_locks():
    for lock in reversed(_LOCKS):
        lock.release()


# A child that is forked while another thread compiles would wait for ever for a lock that nobody there holds: a fork
# waits for the compilation instead.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_locks, after_in_parent=_release_locks, after_in_child=_release_locks)


@helper
def share(worker, workers, total):
    """Return the worker's contiguous part of ``range(total)``."""
    return worker * total // workers, (worker + 1) * total // workers


@intrinsic
def swap_thread_limit(typingctx, threads):
    """Set Numba's thread limit for this thread; returns the former one.

    Compiled code with Numba's own functions for it cannot be cached: they hold addresses.
    """

    def generate(context, builder, signature, args):
        wide, number = ir.IntType(64), ir.IntType(32)

        def declare(name, result, *parameters):
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, parameters), name)

        # Both are C's int; parallel loops declare the first as 64 bits wide, of which the upper half is garbage.
        former = builder.trunc(builder.call(declare("get_num_threads", wide), []), number)
        builder.call(declare("set_num_threads", ir.VoidType(), number), [builder.trunc(args[0], number)])
        return builder.sext(former, wide)

    return types.int64(types.int64), generate


class Kernel:
    """A worker function, ``body(worker, workers, *arrays) -> int``, as a kernel of two flavours.

    Workers must write disjoint cells (or add atomically), and may depend on nothing but their arguments. While a
    worker runs, arithmetic is IEEE's (to nearest, subnormals kept), whatever its thread had set.

    Both flavours run the body for every worker and sum what it returns: ``parallel(workers, threads, *arrays)``
    spreads the workers over that many of Numba's threads, ``serial(workers, *arrays)`` runs them in turn on the
    calling thread. The same bits.
    """

    def __init__(self, body):
        self.name = body.__name__
        self._body = body
        self._run = None  # compiled once for both flavours
        KERNELS.append(self)
        self._flavours = {}

    @property
    def serial(self):
        """The dispatcher for the calling thread alone."""
        return self._flavours.get(False) or self._make(parallel=False)

    @property
    def parallel(self):
        """The dispatcher for Numba's threads."""
        return self._flavours.get(True) or self._make(parallel=True)

    def _make(self, *, parallel):
        # On first use, not while importing: two dozen dispatchers and their caches take 25 ms.
        with _making:
            if parallel not in self._flavours:
                self._run = self._run or helper(self._body)
                self._flavours[parallel] = _dispatcher(self._body, self._run, parallel)
            return self._flavours[parallel]


def _dispatcher(body, run, parallel):
    def drive_serially(workers, *arrays):
        total = 0
        for worker in range(workers):
            mode = enter_ieee_mode()
            total += run(worker, workers, *arrays)
            leave_ieee_mode(mode)
        return total

    def drive_threads(workers, threads, *arrays):
        # Here and not in Python, where an interrupt could come between the loop and the return of the limit.
        limit = swap_thread_limit(threads)
        total = 0
        for worker in prange(workers):
            mode = enter_ieee_mode()
            total += run(worker, workers, *arrays)
            leave_ieee_mode(mode)
        swap_thread_limit(limit)
        return total

    drive = drive_threads if parallel else drive_serially
    drive.__name__, drive.__qualname__, drive.__module__ = body.__name__, body.__qualname__, body.__module__
    dispatcher = njit(parallel=parallel, **_OPTIONS)(drive)
    # Nowhere to write (a read-only install without a home) or a junk setting of Numba's, whose locators raise anything
    # then; or no sources to tell stale code by: compiled anew in each process.
    if _SOURCES:
        with contextlib.suppress(Exception):
            dispatcher._cache = _KernelCache(drive, parallel)
    return dispatcher


def _sources_digest():
    """Digest of all kernel sources, so that an edit of any of them makes every cached kernel stale.

    ``None`` where they are not to be had: bytecode alone, or a frozen program.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    modules = [f"{__package__}.{module.name}" for module in pkgutil.iter_modules(sys.modules[__package__].__path__)]
    if __name__ not in modules:  # an importer that lists nothing
        return None
    for name in sorted(modules):
        try:
            source = find_spec(name).loader.get_source(name)
        except (AttributeError, ImportError):
            return None
        if source is None:
            return None
        digest.update(f"{name} {len(source)} {source}".encode())
    return digest.hexdigest()


# Of the sources as they were imported: a program that outlives an edit or an upgrade must not file its old code as new.
_SOURCES = _sources_digest()


class _CacheFile(IndexDataCacheFile):
    """One file an entry, which holds its own key and a digest of its data.

    Numba's index tells which numbered file holds an entry, and a full disk, a kill or two processes at once can make
    it tell wrong: one dtype's machine code for another's data. A file that is not its key's is no entry, and its data
    is not even unpickled: another version's may not be there to unpickle. A flipped bit that goes unnoticed is worse
    than an error: LLVM aborts the process over damaged code.
    """

    def save(self, key, data):
        data = self._dump(data)
        self._save_data(self._name_of(key), (key, hashlib.sha256(data).digest(), data))

    def load(self, key):
        try:
            found, digest, data = self._load_data(self._name_of(key))
        except FileNotFoundError:
            return None
        if found != key:
            return None
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("not the bytes that were written")
        return pickle.loads(data)  # noqa: S301

    def _name_of(self, key):
        _digest, *rest = key  # left out of the name, so that a new version overwrites the old one's files
        return self._data_name(int(hashlib.sha256(repr(rest).encode()).hexdigest()[:16], 16))


class _KernelCache(FunctionCache):
    """Numba's disk cache, with a key that sees every kernel source and the flavour, and that never fails a call.

    Numba's own key knows only the function's own bytecode: an edited helper in another file would leave stale
    machine code running, and the two flavours of one function would share an entry.
    """

    def __init__(self, py_func, parallel):
        self._identity = (py_func.__module__, py_func.__qualname__, parallel)
        super().__init__(py_func)
        self._cache_file = _CacheFile(self._cache_path, self._impl.filename_base, None)

    def _index_key(self, sig, codegen):
        return _SOURCES, self._identity, repr(sig), codegen.magic_tuple()

    def _load_overload(self, sig, target_context):
        # A truncated file can raise nearly anything while it is unpickled. Compiling anew is always right, and writes
        # a good file over it.
        try:
            return super()._load_overload(sig, target_context)
        except Exception as error:  # noqa: BLE001
            self._warn("read", error)
            return None

    def _save_overload(self, sig, data):
        try:
            super()._save_overload(sig, data)
        except Exception as error:  # noqa: BLE001
            self.disable()
            self._warn("written", error)

    def _warn(self, act, error):
        text = f"a file of the kernel cache in {self.cache_path} cannot be {act} ({error!r}); kernels are compiled anew"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
