"""The way in which these tests run blocks: barriers hold, threads may end early, and a failure comes out."""

from typing import Any

import numpy as np
import pytest

from lowlat.kernels.toolchain.numba_cuda import cuda

THREADS = 64


def test_what_was_written_before_a_barrier_is_there_after_it() -> None:
    @cuda.jit  # type: ignore[untyped-decorator]
    def shift(values: Any, rounds: int) -> None:
        own = cuda.threadIdx.x
        for _ in range(rounds):
            got = values[cuda.blockIdx.x, (own + 1) % THREADS]
            cuda.syncthreads()
            values[cuda.blockIdx.x, own] = got
            cuda.syncthreads()

    values = np.stack([np.arange(THREADS), np.arange(THREADS) + 100])
    shift[2, THREADS](values, 5)
    assert np.array_equal(values, np.roll([np.arange(THREADS), np.arange(THREADS) + 100], -5, axis=1))


def test_threads_that_have_ended_are_not_waited_for() -> None:
    @cuda.jit  # type: ignore[untyped-decorator]
    def count(met: Any) -> None:
        for turn in range(cuda.threadIdx.x):
            met[turn] += 1
            cuda.syncthreads()

    met = np.zeros(THREADS, np.int64)
    count[1, THREADS](met)
    assert np.array_equal(met, THREADS - 1 - np.arange(THREADS))


def test_the_thread_that_fails_is_named() -> None:
    @cuda.jit  # type: ignore[untyped-decorator]
    def fail(one: int) -> None:
        if cuda.blockIdx.x == 1 and cuda.threadIdx.x == one:
            raise ValueError("wrong")
        cuda.syncthreads()

    for one in (0, 17, THREADS - 1):
        with pytest.raises(ValueError, match=rf"thread \({one}, 0, 0\) of block \(1, 0, 0\): wrong"):
            fail[2, THREADS](one)
