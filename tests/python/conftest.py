"""Fixtures: pools of ranks that live as long as the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import RankPool


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool_of(_pools: dict[int, RankPool]):
    """A pool with the number of ranks asked for. One that a failed test has closed is replaced."""

    def get(world_size: int) -> RankPool:
        if world_size not in _pools or not _pools[world_size].usable:
            _pools[world_size] = RankPool(world_size)
        return _pools[world_size]

    return get


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
