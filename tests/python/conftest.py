"""Fixtures: pools of ranks that live as long as the session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpus import join_nccl
from ranks import RankPool, join_group


class _Pools:
    """Pools that live as long as the session. One that a failed test has closed is replaced."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, Callable[[int, int, str], None]], RankPool] = {}

    def get(self, world_size: int, join: Callable[[int, int, str], None] = join_group) -> RankPool:
        key = (world_size, join)
        if key not in self._pools or not self._pools[key].usable:
            self._pools[key] = RankPool(world_size, join)
        return self._pools[key]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def _pools() -> Iterator[_Pools]:
    pools = _Pools()
    yield pools
    pools.close()


@pytest.fixture
def pool_of(_pools: _Pools) -> Callable[[int], RankPool]:
    """A pool with the number of ranks asked for, in a gloo group."""
    return _pools.get


@pytest.fixture
def gpu_ranks(_pools: _Pools) -> RankPool:
    """Two ranks in an NCCL group."""
    return _pools.get(2, join_nccl)


@pytest.fixture
def ranks(pool_of) -> RankPool:
    """Two ranks."""
    return pool_of(2)


@pytest.fixture(params=[2, 3])
def two_or_three_ranks(pool_of, request) -> RankPool:
    return pool_of(request.param)


@pytest.fixture
def broken_ranks() -> Iterator[RankPool]:
    """Two ranks of their own, for tests after which the group is of no use."""
    pool = RankPool(2)
    yield pool
    pool.close()
