"""How kernels are compiled and cached: the only place with Numba options.

No ``fastmath`` anywhere: both modes need NaN and infinities, one needs the order of additions.
"""

import _thread
import contextlib
import hashlib
import os
import pickle
import pkgutil
import sys
import threading
import warnings
from functools import partial
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


def _undisturbed(function, *arguments):
    """Call a function that compiles or loads code where no interrupt reaches it; one that comes is raised afterwards.

    Raised in the midst, it leaves llvmlite's lock taken for ever or Numba's registries half read. Interrupts come to
    the main thread alone, so another one is used. Not where this one holds what that would wait for: a signal's handler
    may call from the midst of another compilation.
    """
    held = _making._is_owned() or global_compiler_lock.is_locked()  # by this thread
    if held or threading.get_ident() != threading.main_thread().ident:
        return function(*arguments)
    interrupt, outcome = None, []

    def run():
        try:
            outcome.append((function(*arguments), None))
        except BaseException as error:  # noqa: BLE001
            outcome.append((None, error))
        running.release()

    running = threading.Lock()
    running.acquire()
    try:
        # Not threading.Thread, whose start an interrupt can break: its locks are taken in Python.
        _thread.start_new_thread(run, ())
    except RuntimeError:  # no more threads here, or the interpreter shuts down
        return function(*arguments)
    while not outcome:  # an interrupt can come after the lock is taken, and before the next line
        try:
            running.acquire()
        except BaseException as raised:  # noqa: BLE001
            interrupt = raised
    result, error = outcome[0]
    if interrupt or error:
        raise interrupt or error
    return result


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


@intrinsic
def _call(typingctx, address, numbers):
    """Call compiled code at an address with integers."""

    def generate(context, builder, signature, args):
        word = ir.IntType(64)
        values = cgutils.unpack_tuple(builder, args[1])
        function = ir.FunctionType(word, [word] * len(values)).as_pointer()
        return builder.call(builder.inttoptr(args[0], function), values)

    return types.int64(types.int64, numbers), generate


@intrinsic
def _closure(typingctx, run, arrays):
    """Addresses of a function ``(worker, workers, block)`` that runs a worker, and of the block that holds its arrays.

    The block lives as long as the caller's frame.
    """
    signature = run.get_call_type(typingctx, (types.int64, types.int64, *arrays), {})

    def generate(context, builder, _, args):
        word = ir.IntType(64)
        block = cgutils.alloca_once_value(builder, args[1])
        kind = ir.FunctionType(word, [word, word, block.type])
        function = ir.Function(builder.module, kind, builder.module.get_unique_name("closure"))
        function.linkage = "internal"
        inside = ir.IRBuilder(function.append_basic_block())
        worker, workers, place = function.args
        values = [worker, workers, *cgutils.unpack_tuple(inside, inside.load(place))]
        compiled = run.dispatcher.get_compile_result(signature)
        context.add_linking_libs([compiled.library])
        _, total = context.call_internal_no_propagate(inside, compiled.fndesc, signature, values)  # none raises
        inside.ret(total)
        addresses = [builder.ptrtoint(pointer, word) for pointer in (function, block)]
        return context.make_tuple(builder, types.UniTuple(types.int64, 2), addresses)

    return types.UniTuple(types.int64, 2)(run, arrays), generate


class Kernel:
    """A worker function, ``body(worker, workers, *arrays) -> int``, as a kernel.

    Workers must write disjoint cells (or add atomically), and may depend on nothing but their arguments. While a
    worker runs, arithmetic is IEEE's (to nearest, subnormals kept), whatever its thread had set.
    """

    def __init__(self, body):
        self.name = body.__name__
        self._body = body
        self._dispatcher = None
        KERNELS.append(self)

    def __call__(self, workers, threads, *arrays):
        """Run the body for every worker; returns the sum of what they return.

        The workers are spread over that many of Numba's threads; of one thread, they run in turn on the calling one.
        The same bits.
        """
        loop = _in_turn if threads == 1 else _on_threads
        return self.dispatcher(loop.address, workers, threads, *arrays)

    @property
    def dispatcher(self):
        """Numba's dispatcher: one compilation for each signature, however many threads run it."""
        # On first use, not while importing: two dozen dispatchers and their caches take 25 ms.
        if self._dispatcher is None:
            _undisturbed(self._make)
        return self._dispatcher

    def _make(self):
        run, body = helper(self._body), self._body

        def drive(loop, workers, threads, *arrays):
            function, block = _closure(run, arrays)
            return _call(loop, (function, block, workers, threads))

        drive.__name__, drive.__qualname__, drive.__module__ = body.__name__, body.__qualname__, body.__module__
        with _making:
            self._dispatcher = self._dispatcher or _cached(drive)


class _Loop:
    """A loop over workers, compiled once for all kernels, which call it through its address.

    As a part of each kernel, Numba's parallel loop took 4 of the 7 seconds that the largest kernel took to compile.
    """

    def __init__(self, *, parallel):
        self._parallel = parallel
        self._found = None
        self.dispatcher = None

    def __call__(self, loop):
        self._loop = loop
        return self

    @property
    def address(self):
        """Of C's ``(function, block, workers, threads)``, all of them 64 bits wide."""
        # Loading a parallel loop, too, starts Numba's threads: not before they are wanted.
        if self._found is None:
            _undisturbed(self._load)
        return self._found

    def _load(self):
        with _making:
            if self._found is None:
                self.dispatcher = _cached(self._loop, parallel=self._parallel)
                self.dispatcher.compile((types.int64,) * 4)
                (compiled,) = self.dispatcher.overloads.values()
                self._found = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)


@_Loop(parallel=False)
def _in_turn(function, block, workers, threads):
    total = 0
    for worker in range(workers):
        mode = enter_ieee_mode()
        total += _call(function, (worker, workers, block))
        leave_ieee_mode(mode)
    return total


@_Loop(parallel=True)
def _on_threads(function, block, workers, threads):
    # Here and not in Python, where an interrupt could come between the loop and the return of the limit.
    limit = swap_thread_limit(threads)
    total = 0
    for worker in prange(workers):
        mode = enter_ieee_mode()
        total += _call(function, (worker, workers, block))
        leave_ieee_mode(mode)
    swap_thread_limit(limit)
    return total


def _cached(function, *, parallel=False):
    dispatcher = njit(parallel=parallel, **_OPTIONS)(function)
    dispatcher.compile = partial(_undisturbed, dispatcher.compile)
    # Nowhere to write (a read-only install without a home) or a junk setting of Numba's, whose locators raise anything
    # then; or no sources to tell stale code by: compiled anew in each process.
    if _SOURCES:
        with contextlib.suppress(Exception):
            dispatcher._cache = _KernelCache(function)
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
    """Numba's disk cache, with a key that sees every kernel source, and that never fails a call.

    Numba's own key knows only the function's own bytecode: an edited helper in another file would leave stale
    machine code running.
    """

    def __init__(self, py_func):
        self._identity = (py_func.__module__, py_func.__qualname__)
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
