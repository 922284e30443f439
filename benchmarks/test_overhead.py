"""What a call costs beside its work: each face of the package on one tiny problem."""

import numpy as np
import pytest

import poolgrad_numba as pg
from poolgrad_numba import aclnn

GRAD, SHAPE = np.ones((1, 2, 2, 2), np.float32), (1, 2, 4, 4)
OWN, OUT = np.empty(SHAPE, np.float32), np.empty(SHAPE, np.float32)
INDICES = np.zeros(GRAD.shape, np.int32)
OPERATOR = "adaptive_max_pool2d_backward"


def public_function():
    return lambda: pg.adaptive_max_pool2d_backward(GRAD, SHAPE, INDICES, out=OUT)


def plan_run():
    plan = pg.make_plan(OPERATOR, input_shape=SHAPE, index_dtype=np.int32, output_size=2)
    return lambda: plan.run(GRAD, INDICES, out=OUT)


def both_phases():
    def run():
        size, executor, _ = aclnn.aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize(GRAD, OWN, INDICES, OUT)
        aclnn.aclnnAdaptiveMaxPool2dBackward(None, size, executor, None)

    return run


def second_phase():
    _, executor, _ = aclnn.aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize(GRAD, OWN, INDICES, OUT)
    aclnn.aclSetAclOpExecutorRepeatable(executor)
    return lambda: aclnn.aclnnAdaptiveMaxPool2dBackward(None, 0, executor, None)


@pytest.mark.parametrize("face", [public_function, plan_run, both_phases, second_phase], ids=lambda face: face.__name__)
def test_overhead(benchmark, face):
    benchmark.group = "overhead"
    benchmark.extra_info.update(op=OPERATOR, provider=face.__name__)
    benchmark(face())
    assert OUT.sum() == GRAD.sum()
