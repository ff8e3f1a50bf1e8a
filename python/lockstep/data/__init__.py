"""Data for the same training on any number of ranks: which samples, in which order, with which random numbers."""

from lockstep.data.sampler import OrderPreservingSampler
from lockstep.data.seeding import (
    SampleSeeded,
    sample_rng,
    sample_seed,
    seed_everything,
    seed_rank_streams,
    worker_init,
)

__all__ = [
    "OrderPreservingSampler",
    "SampleSeeded",
    "sample_rng",
    "sample_seed",
    "seed_everything",
    "seed_rank_streams",
    "worker_init",
]
