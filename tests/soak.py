"""A long-lived server in one process: everything at random, results compared, and nothing may grow.

    python tests/soak.py --seconds 60 --seed 1

Prints one line of JSON and exits with 1 where a result was wrong or something grew. It is measured between actions,
when no other Python thread is left, against what there was after a warm-up in which everything happened already.
"""

import argparse
import collections
import ctypes
import faulthandler
import gc
import inspect
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("NUMBA_NUM_THREADS", "8")
sys.path.append(str(Path(__file__).parents[1]))  # this very package, unless another one was asked for

import numba
import numpy as np

import cases
import poolgrad_numba as pg
import reference
from poolgrad_numba import aclnn, operands
from poolgrad_numba.aclnn.executor import _planned
from poolgrad_numba.kernels._jit import KERNELS
from poolgrad_numba.plan import _MOST_RECENT, _plan, _recent
from support import algorithms, same_bits

EXACT = ("threads", "files", "children", "signatures", "plans", "phases")  # as after the warm-up, always
# How far the median of the last quarter may lie above that of the second. In ten runs it did by at most 372, 140 and
# 1344; 100 kB/s kept for a minute are some 3000 KiB.
LIMITS = {"rss_kib": 2048, "malloc_kib": 768, "blocks": 4000}
SAMPLES = 24
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of malloc.h
PATIENCE = 60  # seconds that a forked child or a thread may take


class Wrong(Exception):  # noqa: N818  (a finding, not an error of this program)
    """What the product did wrong."""


class Interrupted(KeyboardInterrupt):
    """What a signal raises in the middle of a call."""


class Job(NamedTuple):
    operator: str
    input_shape: tuple[int, ...]
    parameters: dict[str, Any]  # of the public function
    planned: dict[str, Any]  # of make_plan: the output's size too
    grad: Any
    indices: Any
    want: Any
    exact: bool  # no sum rounds, so that fast mode gives the same bits

    def plan(self, **options):
        index_dtype = None if self.indices is None else self.indices.dtype
        keywords = {"dtype": self.grad.dtype, "index_dtype": index_dtype, **self.planned, **options}
        return pg.make_plan(self.operator, input_shape=self.input_shape, **keywords)


def check(good, what, job=None):
    if not good:
        about = "" if job is None else f": {job.operator} {job.grad.dtype} {job.input_shape} {job.planned}"
        raise Wrong(f"{what}{about}")


# -- problems ----------------------------------------------------------------------------------------------------


def remembered():
    """The fixed problems, with the oracle's bytes: rounded sums for deterministic mode, exact ones for both."""
    jobs = []
    for number, case in enumerate(cases.SMALL_CASES):
        for dtype, index_dtype in zip(cases.DTYPES, cases.INDEX_DTYPES * 2, strict=True):
            for exact in (False, True):
                grad = (case.gradient if exact else case.rough_gradient)(dtype, number)
                divisor = {"divisor_override": -4} if exact and not case.indexed else {}
                parameters = {**case.parameters, **divisor}
                indices = (case.wild_indices if number % 2 else case.indices)(index_dtype)
                want = reference.apply(case.operator, grad, case.input_shape, indices, **parameters)
                planned = case.plan_parameters if case.indexed else parameters
                jobs.append(Job(case.operator, case.input_shape, parameters, planned, grad, indices, want, exact))
    return jobs


def unseen(rng, operator=None, kinds=None):
    """A problem that was most likely never met before; what one thread makes of it is what all others must make."""
    operator = operator or rng.choice(sorted(pg.OPS))
    dtype, index_dtype = kinds or (rng.choice(cases.DTYPES), rng.choice(cases.INDEX_DTYPES))
    signature = pg.OPS[operator].signature
    longest = rng.choice((6, 20, 20, 48)) if signature.spatial == 3 else rng.choice((12, 60, 60, 400))
    while True:
        size = tuple(rng.randint(1, longest) for _ in range(signature.spatial))
        shape = rng.choice(((rng.randint(1, 4), rng.randint(1, 5)), (rng.randint(1, 6),))) + size
        parameters = {}
        planned = {"output_size": tuple(rng.randint(1, 14) for _ in size)}
        if not signature.adaptive:
            kernel = tuple(rng.randint(1, 5) for _ in size)
            choices = {
                "kernel_size": kernel,
                "stride": tuple(rng.randint(1, 4) for _ in size),
                "padding": tuple(rng.randint(0, k // 2) for k in kernel),
                "dilation": rng.randint(1, 2),
                "ceil_mode": rng.random() < 0.5,
                "count_include_pad": rng.random() < 0.5,
                "divisor_override": rng.choice((None, 1, 8, -4)),
            }
            planned = parameters = {name: choices[name] for name in signature.parameters}
        kinds = {"dtype": dtype, "index_dtype": index_dtype if signature.indexed else None}
        try:
            plan = pg.make_plan(operator, input_shape=shape, **kinds, **planned, deterministic=True, num_threads=1)
        except pg.PoolGradValueError as error:
            check("too small for the window" in str(error), str(error))
            continue
        numbers = np.random.default_rng(rng.getrandbits(32))
        grad = numbers.integers(-4, 5, plan.output_shape).astype(dtype)
        indices = None
        if signature.indexed:
            indices = numbers.integers(0, plan.problem.cells, plan.output_shape).astype(index_dtype)
        exact = signature.indexed or planned.get("divisor_override") is not None
        return Job(operator, shape, parameters, planned, grad, indices, plan.run(grad, indices), exact)


def disguised(array, rng):
    """The same values in another layout."""
    kind = rng.randrange(7)
    if array is None or kind == 0:
        return array
    if kind == 1:
        return np.asfortranarray(array)
    if kind == 2:
        return array[::-1].copy()[::-1]
    if kind == 3:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if kind == 4:
        view = array.view()
        view.flags.writeable = False
        return view
    if kind == 5 and array.dtype.isbuiltin == 1:
        return array.astype(array.dtype.newbyteorder())
    unaligned = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes + 1), 1)
    unaligned[...] = array
    return unaligned


# -- actions -----------------------------------------------------------------------------------------------------


def run(job, rng):
    """One run of a job, in one of the ways that there are."""
    deterministic = not job.exact or rng.random() < 0.5
    mode = {"deterministic": deterministic, "num_threads": rng.randint(1, 8)}
    grad, indices = disguised(job.grad, rng), disguised(job.indices, rng)
    out = disguised(np.full(job.input_shape, 7, job.grad.dtype), rng) if rng.random() < 0.5 else None
    if out is not None and not out.flags.writeable:
        out = None
    arrays = (grad, job.input_shape) if job.indices is None else (grad, job.input_shape, indices)
    function = getattr(pg, job.operator)
    way = rng.randrange(4)
    if way == 0:
        got = function(*arrays, **job.parameters, **mode, out=out)
    elif way == 1:
        with pg.config_context(**mode) as config:
            check(config == pg.get_config(), f"{config} inside a block, then {pg.get_config()}")
            check(config.deterministic == deterministic, f"{config} for {mode}")
            got = function(*arrays, **job.parameters, out=out)
    else:
        names = algorithms(job.operator, deterministic=deterministic)
        plan = job.plan(**mode, algorithm=rng.choice(names) if way == 2 else None)
        workspace = None
        if rng.random() < 0.5:
            workspace = np.full(plan.workspace_size_for(grad, indices, out), 255, np.uint8)
        mode["algorithm"] = plan.algorithm
        got = plan.run(grad, indices, out=out, workspace=workspace)
    # out may have had another byte order
    check(same_bits(got.astype(job.grad.dtype), job.want), f"other bits than remembered with {mode}", job)


def burst(job, rng):
    """Many runs in a row, for what goes wrong once in thousands."""
    for name in algorithms(job.operator, deterministic=not job.exact):
        plan = job.plan(deterministic=not job.exact, num_threads=rng.choice((1, 1, 1, 2)), algorithm=name)
        out = np.empty(job.input_shape, job.grad.dtype)
        for _ in range(50):
            plan.run(job.grad, job.indices, out=out)
            check(same_bits(out, job.want), f"other bits than remembered by {name}, {plan.workers} workers", job)


def first_phase(job, rng):
    """Phase 1 on a job: (the function of phase 2, result, what phase 1 gave)."""
    name = pg.OPS[job.operator].aclnn
    result = np.full(job.input_shape, 7, job.grad.dtype)
    spatial = pg.OPS[job.operator].signature.spatial
    given = {"gradOutput": job.grad, "self": result, "indices": job.indices, "gradInput": result, "output": result}
    kinds = {np.dtype(np.float32): aclnn.ACL_FLOAT, np.dtype(np.int32): aclnn.ACL_INT32}
    for tensor, array in given.items():
        kind = None if array is None else kinds.get(array.dtype)
        if kind is not None and rng.random() < 0.5:
            given[tensor] = aclnn.aclCreateTensor(array.shape, kind, None, 0, aclnn.ACL_FORMAT_ND, [array.size], array)
    p = {"kernel_size": 1, "stride": None, "padding": 0, "dilation": 1, **job.parameters}
    for parameter in ("kernel_size", "stride", "padding", "dilation"):
        values = () if p[parameter] is None else reference.as_axes(p[parameter], spatial)
        given["kernelSize" if parameter == "kernel_size" else parameter] = aclnn.aclCreateIntArray(values)
    given["ceilMode"], given["countIncludePad"] = p.get("ceil_mode", False), p.get("count_include_pad", True)
    given["divisorOverride"] = p.get("divisor_override") or 0
    phase = getattr(aclnn, f"{name}GetWorkspaceSize")
    return getattr(aclnn, name), result, phase(*(given[argument] for argument in inspect.signature(phase).parameters))


def two_phases(jobs, rng, *, streams=True):
    """Jobs on a stream or at once, with a context whose toggle says which mode."""
    context, _ = aclnn.aclrtCreateContext(0)
    exact = all(job.exact for job in jobs)
    aclnn.aclrtCtxSetSysParamOpt(aclnn.ACL_OPT_DETERMINISTIC, 0 if exact and rng.random() < 0.5 else 1)
    stream = aclnn.aclrtCreateStream()[0] if streams and rng.random() < 0.7 else None
    results = []
    for job in jobs:
        phase2, result, (size, executor, status) = first_phase(job, rng)
        if status:  # double precision, say
            check(status == aclnn.ACLNN_ERR_PARAM_INVALID and executor is None, aclnn.aclGetRecentErrMsg(), job)
            continue
        workspace = np.full(size, 255, np.uint8)
        repeats = rng.choice((1, 1, 3))
        if repeats > 1:
            aclnn.aclSetAclOpExecutorRepeatable(executor)
        for _ in range(repeats):
            check(phase2(workspace, size, executor, stream) == 0, aclnn.aclGetRecentErrMsg(), job)
        if repeats == 1:
            check(phase2(workspace, size, executor, stream) == aclnn.ACLNN_ERR_INNER, "an executor ran twice")
        elif rng.random() < 0.5:
            aclnn.aclDestroyAclOpExecutor(executor)
        results.append((job, result))
    check(aclnn.aclrtSynchronizeStream(stream) == 0, aclnn.aclGetRecentErrMsg())
    for job, result in results:
        check(same_bits(result, job.want), "other bits than remembered, on a stream" if stream else "in phase 2", job)
    if stream is not None and rng.random() < 0.7:  # the others are only let go of
        aclnn.aclrtDestroyStream(stream)
    if rng.random() < 0.7:
        aclnn.aclrtDestroyContext(context)


def errors(job, rng):
    """What must be refused, on both faces."""
    bad, options = rng.choice((-1, -(2**31), 2**31 - 1)), {"num_threads": rng.randint(1, 8)}
    plan = job.plan(deterministic=rng.random() < 0.5, **options)
    indices = None if job.indices is None else np.where(np.arange(job.grad.size) % 97 == 0, bad, 0).astype(np.int32)
    attempts = [
        lambda: plan.run(job.grad[..., :-1], job.indices),
        lambda: plan.run(job.grad.astype(np.int8), job.indices),
        lambda: plan.run(job.grad, job.indices, out=np.zeros(3)),
        lambda: plan.run(job.grad, job.indices, workspace=np.zeros(0, np.uint8) if plan.workspace_size else 5),
        lambda: job.plan(algorithm="no such", **options),
        lambda: job.plan(num_threads=0),
        lambda: pg.set_config(deterministic=1),
    ]
    if indices is not None:
        broken = job._replace(indices=indices.reshape(job.grad.shape))
        attempts.append(lambda: broken.plan(**options).run(broken.grad, broken.indices))
        stream, _ = aclnn.aclrtCreateStream()
        phase2, _, (size, executor, status) = first_phase(broken, rng)
        if not status:
            check(phase2(np.zeros(size, np.uint8), size, executor, stream) == 0, aclnn.aclGetRecentErrMsg())
            check(aclnn.aclrtSynchronizeStream(stream) == aclnn.ACLNN_ERR_PARAM_INVALID, "a bad index passed a stream")
        aclnn.aclrtDestroyStream(stream)
    for number, attempt in enumerate(attempts):
        try:
            attempt()
        except pg.PoolGradError:
            continue
        raise Wrong(f"attempt {number} was not refused: {job.operator} {job.input_shape} {job.planned}")


def interrupted(jobs, rng):
    """A signal in the middle of a call, as Ctrl-C is.

    No streams here: where it hits the standard library's own clean-up of a thread pool, Python drops it, and the
    pool's thread waits for ever.
    """
    limit, deadline = numba.get_num_threads(), time.monotonic() + 2
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 5e-3))
        while time.monotonic() < deadline:
            pg.set_config()  # changes nothing, and takes the lock
            run(rng.choice(jobs), rng)
            two_phases([unseen(rng)], rng, streams=False)
    except Interrupted:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    after = numba.get_num_threads()
    check(after == limit, f"Numba's limit is {after} after an interrupt, not {limit}")


def _interrupt(signum, frame):
    raise Interrupted


def forked(job, rng):
    """A child that computes and exits."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            run(job, rng)
            code = 0
        except BaseException:  # noqa: BLE001  (the child ends here)
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGUSR1)  # it tells where it is
            time.sleep(1)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Wrong("a forked child hung")
        time.sleep(0.001)
    check(ended[1] == 0, f"a forked child ended with {os.waitstatus_to_exitcode(ended[1])}")


def pool(jobs, rng):
    with multiprocessing.get_context("fork").Pool(2) as workers:
        workers.starmap(run, [(rng.choice(jobs), random.Random(rng.getrandbits(32))) for _ in range(6)])
        workers.close()
        workers.join()


def crowd(jobs, rng):
    """Python threads that come and go, and a fork while they are at it."""
    failures = []

    def work(rng):
        try:
            for _ in range(rng.randint(1, 6)):
                alone(jobs, rng)
        except Exception as failure:  # noqa: BLE001  (raised below)
            failures.append(failure)

    seeds = [random.Random(rng.getrandbits(32)) for _ in range(rng.randint(2, 5))]
    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in seeds]
    for thread in threads:
        thread.start()
    try:
        if rng.random() < 0.5:
            forked(rng.choice(jobs), rng)
    finally:
        for thread in threads:
            thread.join(PATIENCE)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
        raise Wrong("a thread hung")
    if failures:
        raise failures[0]


def settings(jobs, rng):
    """The settings of the process, the device and its default context, up and down again."""
    job = rng.choice([job for job in jobs if not job.exact])
    operands = (job.grad, job.input_shape) if job.indices is None else (job.grad, job.input_shape, job.indices)
    pg.set_config(deterministic=True, num_threads=rng.randint(1, 8))
    got = getattr(pg, job.operator)(*operands, **job.parameters)
    pg.set_config(deterministic=None, num_threads=None)
    check(same_bits(got, job.want), "other bits than remembered after set_config", job)
    statuses = [aclnn.aclInit(), aclnn.aclrtSetDevice(0), aclnn.aclrtSetSysParamOpt(aclnn.ACL_OPT_DETERMINISTIC, 1)]
    stream, _ = aclnn.aclrtCreateStream()
    two_phases([job], rng)
    statuses += [aclnn.aclrtResetDevice(0), aclnn.aclFinalize()]
    check(not any(statuses), f"statuses {statuses}")
    check(aclnn.aclrtSynchronizeStream(stream) == aclnn.ACL_ERROR_RT_STREAM_CONTEXT, "a stream outlived aclFinalize")


def alone(jobs, rng):
    """What any thread may do while others do the like."""
    kind = rng.choices(("remembered", "unseen", "two_phases", "errors", "burst"), (6, 3, 2, 1, 2))[0]
    if kind == "remembered":
        run(rng.choice(jobs), rng)
    elif kind == "unseen":
        run(unseen(rng), rng)
    elif kind == "burst":
        burst(rng.choice([job for job in jobs if job.want.size < 2000]), rng)
    elif kind == "two_phases":
        two_phases([*rng.sample(jobs, 3), unseen(rng)], rng)
    else:
        errors(rng.choice(jobs), rng)


def act(jobs, rng):
    """One action of the main thread; its name."""
    actions = {alone: 60, crowd: 4, interrupted: 6, forked: 2, settings: 2, pool: 0.2}
    action = rng.choices(list(actions), list(actions.values()))[0]
    action(rng.choice(jobs) if action is forked else jobs, rng)
    return action.__name__


# -- measures ----------------------------------------------------------------------------------------------------


class _Mallinfo2(ctypes.Structure):
    _fields_ = [("unused", ctypes.c_size_t * 4), ("mapped", ctypes.c_size_t), ("other", ctypes.c_size_t * 2),
                ("used", ctypes.c_size_t), ("rest", ctypes.c_size_t * 2)]  # fmt: skip


def _glibc(name, *arguments, result=ctypes.c_int):
    """Call a function of glibc's allocator; ``None`` where there is another one."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        return None
    function.restype = result
    return function(*arguments)


def keep_little():
    """Have freed memory returned, which glibc keeps by and by in up to 8 arenas a core: some 10 MiB in each here."""
    _glibc("mallopt", M_ARENA_MAX, 2)
    _glibc("mallopt", M_MMAP_THRESHOLD, 128 << 10)  # fixed: by default it follows the largest block that was freed


def count(folder):
    return len(list(Path("/proc/self", folder).iterdir()))


def sample(steady, threads=None):
    """What there is now that all is quiet; ``threads`` may still be on their way out, down to so many."""
    gc.collect()
    steady.plan(deterministic=True, num_threads=8, algorithm="gather").run(steady.grad)  # OpenMP's team: 8
    deadline = time.monotonic() + 10
    while count("task") != threads and time.monotonic() < deadline:
        time.sleep(0.01)
        if threads is None and deadline - time.monotonic() < 9:
            break
    _glibc("malloc_trim", 0)
    used = _glibc("mallinfo2", result=_Mallinfo2)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        children = 1
    except ChildProcessError:
        children = 0
    rss = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "threads": count("task"),
        "files": count("fd"),
        "children": children,
        "signatures": sum(len(kernel.dispatcher.overloads) for kernel in KERNELS),
        "plans": _plan.cache_info().currsize,
        "recent": len(_recent),
        "phases": _planned.cache_info().currsize,
        "rss_kib": int(rss.split()[1]),
        "malloc_kib": (used.used + used.mapped) // 1024 if used is not None else 0,
        "blocks": sys.getallocatedblocks(),
    }


def growth(samples):
    """Median of the last quarter less that of the second quarter, of each measure that is limited."""
    quarter = len(samples) // 4
    middles = [
        {name: statistics.median(s[name] for s in part) for name in LIMITS}
        for part in (samples[quarter : 2 * quarter], samples[-quarter:])
    ]
    return {name: middles[1][name] - middles[0][name] for name in LIMITS}


def warm_up(jobs, rng):
    """Compile or load every kernel, fill the caches of plans, and do everything a few times."""
    for operator, *kinds, deterministic in itertools.product(
        sorted(pg.OPS), cases.DTYPES, cases.INDEX_DTYPES, (False, True)
    ):
        for name in algorithms(operator, deterministic=deterministic):
            several = None
            while several is None or several.workers == 1:
                job = unseen(rng, operator, kinds)
                one, several = (job.plan(deterministic=deterministic, num_threads=n, algorithm=name) for n in (1, 8))
            one.run(job.grad, job.indices)
            several.run(job.grad, job.indices)
    for dtype, threads in itertools.product(cases.DTYPES, (1, 8)):
        turned = np.zeros((8, 16_384), dtype).T
        operands.copy(np.empty(turned.shape, dtype), turned, threads)
    full = _plan.cache_info().maxsize
    while min(_plan.cache_info().currsize, _planned.cache_info().currsize) < full or len(_recent) < _MOST_RECENT:
        job = unseen(rng)
        first_phase(job, rng)
        run(job, rng)
    for action in (interrupted, settings, pool, *[crowd] * 5, *[alone] * 300):
        action(jobs, rng)
    forked(jobs[0], rng)


def soak(seconds, rng, figures):
    """Act until the time is over; fills in ``figures`` as it goes."""
    started = time.monotonic()
    jobs = remembered()
    steady = next(job for job in jobs if job.operator == cases.AVG3D and len(job.grad.ravel()) > 1000)
    warm_up(jobs, rng)
    gc.freeze()  # what compiling left behind, which each sample's collection would walk
    first = sample(steady)
    samples, done = [first], collections.Counter()
    figures.update(warm_up_seconds=round(time.monotonic() - started, 1), actions=done, first=first)
    begun = time.monotonic()
    while (spent := time.monotonic() - begun) < seconds:
        done[act(jobs, rng)] += 1
        if spent > seconds * len(samples) / SAMPLES:
            samples.append(sample(steady, first["threads"]))
            names = [thread.name for thread in threading.enumerate()]
            for name in EXACT:
                now = samples[-1][name]
                check(now == first[name], f"{name}: {first[name]} after warm-up, now {now}; Python's threads: {names}")
            check(samples[-1]["recent"] <= _MOST_RECENT, f"{samples[-1]['recent']} recent plans are kept")
    figures.update(last=samples[-1], growth=growth(samples))
    for name, limit in LIMITS.items():
        check(figures["growth"][name] <= limit, f"{name} grew by {figures['growth'][name]}, more than {limit}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, _interrupt)
    faulthandler.register(signal.SIGUSR1)
    keep_little()
    faulthandler.dump_traceback_later(arguments.seconds + 1200, exit=True)
    figures = {"seed": arguments.seed, "seconds": arguments.seconds, "failure": None}
    try:
        soak(arguments.seconds, random.Random(arguments.seed), figures)
    except Wrong as wrong:
        figures["failure"] = str(wrong)
    print(json.dumps(figures), flush=True)  # noqa: T201
    if figures["failure"]:
        os._exit(1)  # threads that hang would be waited for


if __name__ == "__main__":
    main()
