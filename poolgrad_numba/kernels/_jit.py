"""How kernels are compiled and cached: the only place with Numba options.

No ``fastmath`` anywhere: both modes need NaN and infinities, one needs the order of additions.
"""

import contextlib
import hashlib
import os
import threading
import warnings
from functools import cache
from importlib import resources

import numba
from numba import njit, prange
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock

from poolgrad_numba.kernels.numeric import enter_ieee_mode, leave_ieee_mode

# nogil: other Python threads (streams, data loaders) go on while a kernel runs.
_OPTIONS = {"error_model": "numpy", "nogil": True, "boundscheck": False, "fastmath": False}

helper = njit(**_OPTIONS)


KERNELS = []  # all that there are
_making = threading.Lock()  # held while a dispatcher is made, so that threads calling at once make one
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


class Kernel:
    """A worker function, ``body(worker, workers, *arrays) -> int``, as a kernel of two flavours.

    Workers must write disjoint cells (or add atomically), and may depend on nothing but their arguments. While a
    worker runs, arithmetic is IEEE's (to nearest, subnormals kept), whatever its thread had set.

    A flavour is called as ``flavour(workers, *arrays)``. Both run the body for every worker and sum what
    it returns; ``parallel`` spreads the workers over Numba's threads, ``serial`` runs them in turn on the calling
    thread: the same bits.
    """

    def __init__(self, body):
        self.name = body.__name__
        self._body = body
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
                self._flavours[parallel] = _dispatcher(self._body, parallel)
            return self._flavours[parallel]


def _dispatcher(body, parallel):
    run = helper(body)

    def drive(workers, *arrays):
        total = 0
        for worker in prange(workers):
            mode = enter_ieee_mode()
            total += run(worker, workers, *arrays)
            leave_ieee_mode(mode)
        return total

    drive.__name__, drive.__qualname__, drive.__module__ = body.__name__, body.__qualname__, body.__module__
    dispatcher = njit(parallel=parallel, **_OPTIONS)(drive)
    # Nowhere to write (a read-only install without a home): compiled anew in each process.
    with contextlib.suppress(RuntimeError, OSError):
        dispatcher._cache = _KernelCache(drive, parallel)
    return dispatcher


@cache
def sources_digest():
    """Digest of all kernel sources, so that an edit of any of them makes every cached kernel stale."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(resources.files(__package__).iterdir(), key=lambda entry: entry.name):
        if source.name.endswith(".py"):
            digest.update(source.name.encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()


class _CacheFile(IndexDataCacheFile):
    """One file an entry, which holds its own key.

    Numba's index tells which numbered file holds an entry, and a full disk, a kill or two processes at once can make
    it tell wrong: one dtype's machine code for another's data. A file that is not its key's is no entry.
    """

    def save(self, key, data):
        self._save_data(self._name_of(key), (key, data))

    def load(self, key):
        try:
            found, data = self._load_data(self._name_of(key))
        except FileNotFoundError:
            return None
        return data if found == key else None

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
        return sources_digest(), self._identity, repr(sig), codegen.magic_tuple()

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
