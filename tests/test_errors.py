"""The exceptions: what they are, what they carry, that they travel."""

import pickle

import numpy as np
import pytest

import poolgrad_numba as pg


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(pg.PoolGradValueError, ValueError), (pg.PoolGradTypeError, TypeError), (pg.PoolGradIndexError, IndexError)],
)
def test_kinds(kind, builtin):
    error = kind("message")
    assert isinstance(error, builtin)
    assert isinstance(error, pg.PoolGradError)
    assert error.status == 161002
    assert kind("message", status=161001).status == 161001
    assert pg.PoolGradError("message").status == 361001


def test_errors_pickle_with_their_status():
    error = pickle.loads(pickle.dumps(pg.PoolGradTypeError("text", status=161001)))  # noqa: S301
    assert (type(error), str(error), error.status) == (pg.PoolGradTypeError, "text", 161001)


@pytest.mark.parametrize("missing", ["grad_output", "input_shape", "indices", "kernel_size"])
def test_a_missing_argument_has_the_null_pointer_status(missing):
    arguments = {
        "grad_output": np.ones((1, 2, 2), np.float32),
        "input_shape": (1, 4, 4),
        "indices": np.zeros((1, 2, 2), np.int64),
        "kernel_size": 2,
    }
    with pytest.raises(pg.PoolGradTypeError, match=f"{missing}: got None") as error:
        pg.max_pool2d_with_indices_backward(**{**arguments, missing: None})
    assert error.value.status == 161001
