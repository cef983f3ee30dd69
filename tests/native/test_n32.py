"""The packed layout in NumPy: byte for byte what the native packing writes, and its inverse gives every plane back."""

from __future__ import annotations

import numpy as np
import pytest

from nano_vllm._native import kernels
from nano_vllm.sources import _n32

from .test_linear import MATRICES, packed, weights


@pytest.mark.parametrize("format, group, minimum, k", MATRICES)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 83])
def test_the_layout_is_the_kernels_own_and_can_be_undone(format, group, minimum, k, n):
    tensor = weights(format, group, minimum, n, k)
    ours = _n32.pack(tensor)
    np.testing.assert_array_equal(ours.reshape(1, -1), packed(tensor).packed)
    assert ours.nbytes == _n32.nbytes(tensor.info) == kernels.packed_bytes(format, n, k, group, minimum)
    assert ours.shape == (-(-n // 32), _n32.block_bytes(tensor.info))
    back = _n32.unpack(tensor.info, ours.reshape(-1))
    assert back.info == tensor.info and set(back.planes) == set(tensor.planes)
    for name, plane in tensor.planes.items():
        assert back.planes[name].dtype == plane.dtype and back.planes[name].flags.c_contiguous, name
        np.testing.assert_array_equal(back.planes[name], plane, err_msg=name)
