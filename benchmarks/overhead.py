"""What a call costs beside its work: `python benchmarks/overhead.py`.

Median microseconds of each face on a tiny problem, taking turns in one process, and what importing adds to Numba's own
import, in fresh processes.
"""

import statistics
import subprocess
import sys
import time

import numpy as np

import poolgrad_numba as pg
from peers import interleaved
from poolgrad_numba import aclnn


def faces():
    """Each way to run one tiny problem."""
    grad, own = np.ones((1, 2, 2, 2), np.float32), np.empty((1, 2, 4, 4), np.float32)
    indices, out = np.zeros((1, 2, 2, 2), np.int32), np.empty((1, 2, 4, 4), np.float32)
    plan = pg.make_plan("adaptive_max_pool2d_backward", input_shape=own.shape, index_dtype=np.int32, output_size=2)

    def both_phases():
        size, executor, _ = aclnn.aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize(grad, own, indices, out)
        aclnn.aclnnAdaptiveMaxPool2dBackward(None, size, executor, None)

    _, repeatable, _ = aclnn.aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize(grad, own, indices, out)
    aclnn.aclSetAclOpExecutorRepeatable(repeatable)
    return {
        "public function": lambda: pg.adaptive_max_pool2d_backward(grad, own.shape, indices, out=out),
        "plan.run": lambda: plan.run(grad, indices, out=out),
        "both phases": both_phases,
        "second phase": lambda: aclnn.aclnnAdaptiveMaxPool2dBackward(None, 0, repeatable, None),
    }


def import_seconds(statement):
    """Wall time of a fresh process that imports."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main():
    """Print both tables."""
    for name, seconds in interleaved(faces(), rounds=3000).items():
        print(f"{name}: {1e6 * seconds:.1f} us")
    times = {"import numba": [], "import poolgrad_numba": []}
    for _ in range(10):
        for statement, seconds in times.items():
            seconds.append(import_seconds(statement))
    numba, ours = (statistics.median(seconds) for seconds in times.values())
    print(f"import poolgrad_numba: {ours / numba:.2f} times import numba")


if __name__ == "__main__":
    main()
