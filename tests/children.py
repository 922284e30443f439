"""Work for child processes and ways to start them; a module of its own, so that spawned ones can import it."""

import ctypes
import ctypes.util
import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

import ml_dtypes
import numpy as np

import cases
from poolgrad_numba import threads
from support import plan_for

PATIENCE = 60
BY_NAME = {case.name: case for case in cases.SMALL_CASES}
JOBS = (
    ("adaptive2d_one_plane", "tile_reduce", np.float32),
    ("max_overlapping", "plane_scatter", np.float16),
    ("avg_one_plane", "gather", ml_dtypes.bfloat16),
)


def digest(_=None):
    """Deterministic results, each computed by two workers."""
    result = hashlib.sha256()
    for name, algorithm, dtype in JOBS:
        case = BY_NAME[name]
        plan = plan_for(case, dtype, deterministic=True, num_threads=2, algorithm=algorithm)
        grad = case.rough_gradient().astype(dtype)
        result.update(plan.run(*(grad, case.indices()) if case.indexed else (grad,)).tobytes())
    return result.hexdigest()


def answer(work=digest):
    """What a child has to say: its digest, how many warnings it gave, and how many threads it may use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return work(), len(caught), threads.most()


def fork(work=answer):
    """Do work in a forked child, and return what it answers; a time-out or a signal is an error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + PATIENCE
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            raise TimeoutError("a forked child hangs")
        time.sleep(0.01)
    if ended[1]:
        raise ChildProcessError(f"a forked child ended with {os.waitstatus_to_exitcode(ended[1])}")
    with os.fdopen(reading, "rb") as pipe:
        return json.loads(pipe.read())


def on_a_thread(work):
    """Do work on a thread that Python starts for it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def while_others_compute(work):
    """Do work while four threads keep calling."""
    done = threading.Event()

    def compute():
        while not done.is_set():
            digest()

    others = [threading.Thread(target=compute) for _ in range(4)]
    for other in others:
        other.start()
    try:
        return work()
    finally:
        done.set()
        for other in others:
            other.join()


OPENMP = ctypes.util.find_library("gomp")


def openmp_region(work, threads=4):
    """Do work on every thread of a team of GNU OpenMP's, as another library may; what each returned."""
    found = []
    task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(work()))
    ctypes.CDLL(OPENMP).GOMP_parallel(task, None, threads, 0)
    return found


def pool(method, work=answer):
    """Do the work in a pool of processes of multiprocessing's."""
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as executor:
        return executor.submit(work).result(PATIENCE)


WAYS = {
    "fork": fork,
    "grandchild": lambda: fork(fork),
    "fork from a side thread": lambda: on_a_thread(fork),
    "fork, then a side thread": lambda: fork(lambda: on_a_thread(answer)),
    "fork while others compute": lambda: while_others_compute(fork),
    "pool of forks": lambda: pool("fork"),
    "fork of a pool's fork": lambda: pool("fork", fork),
    "forkserver": lambda: pool("forkserver"),
    "fork of a forkserver's child": lambda: pool("forkserver", fork),
    "spawn": lambda: pool("spawn"),
    "fork of a spawned child": lambda: pool("spawn", fork),
}


class Digests:
    """A data set whose items are digests, as a loader's workers compute them."""

    def __len__(self):
        return 6

    def __getitem__(self, _):
        return digest()


def main():
    """Compute here, start children in every way there is, and print what each answered."""
    import numba

    answers = {"parent": answer()}
    answers |= {name: way() for name, way in WAYS.items()}
    answers["parent afterwards"] = answer()
    json.dump({"layer": numba.threading_layer(), "answers": answers}, sys.stdout)
