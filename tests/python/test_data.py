"""OrderPreservingSampler against a one-process loader, and seeds that depend on what they are for."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep
from lockstep.data import (
    OrderPreservingSampler,
    SampleSeeded,
    sample_rng,
    sample_seed,
    seed_everything,
    seed_rank_streams,
    worker_init,
)


def one_process(length: int, batch_size: int, shuffle: bool, seed: int, epoch: int, drop_last: bool) -> list[list[int]]:
    """The batches of torch's own loader and sampler in one process."""
    order = DistributedSampler(range(length), num_replicas=1, rank=0, shuffle=shuffle, seed=seed)
    order.set_epoch(epoch)
    loader = DataLoader(range(length), batch_size=batch_size, sampler=order, drop_last=drop_last, collate_fn=list)
    return list(loader)


def together(parts: list[list[list[int]]]) -> list[list[int]]:
    """The parts of all ranks, joined step by step."""
    return [[index for part in step for index in part] for step in zip(*parts, strict=True)]


settings_of_a_run = {
    "length": st.integers(0, 60),
    "batch_size": st.integers(1, 17),
    "shuffle": st.booleans(),
    "seed": st.integers(0, 5),
    "epoch": st.integers(0, 5),
    "drop_last": st.booleans(),
}


@settings(deadline=None)
@given(world_size=st.integers(1, 5), data=st.fixed_dictionaries(settings_of_a_run))
def test_ranks_together_see_the_batches_of_one_process_in_their_order(world_size, data):
    samplers = make(world_size, **data)

    parts = [list(sampler) for sampler in samplers]

    assert together(parts) == one_process(**data)
    for step, batches in enumerate(zip(*parts, strict=True)):
        assert [len(batch) for batch in batches] == samplers[0].shares(step)
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
    assert {len(sampler) for sampler in samplers} == {len(parts[0])}


@settings(deadline=None)
@given(
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.fixed_dictionaries(settings_of_a_run),
    done=st.integers(0, 60),
)
def test_a_run_goes_on_in_mid_epoch_with_any_number_of_ranks(worlds, data, done):
    whole = one_process(**data)
    done = min(done, len(whole))
    first = make(worlds[0], **data)[0]
    steps = iter(first)
    for _ in range(done):
        next(steps)

    samplers = make(worlds[1], **(data | {"epoch": 0}))
    for sampler in samplers:
        sampler.load_state_dict(first.state_dict())
        sampler.set_epoch(data["epoch"])  # as a training loop does; must not lose the position

    assert together([list(sampler) for sampler in samplers]) == whole[done:]
    for sampler in samplers:  # the next pass is a whole one
        sampler.set_epoch(data["epoch"] + 1)
    assert together([list(sampler) for sampler in samplers]) == one_process(**(data | {"epoch": data["epoch"] + 1}))


def make(world_size: int, length: int, epoch: int, **arguments) -> list[OrderPreservingSampler]:
    samplers = [
        OrderPreservingSampler(length, rank=rank, world_size=world_size, empty="yield", **arguments)
        for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def test_a_rank_that_would_get_no_samples_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"the last step of an epoch has 1 samples for 2 ranks.*drop_last=True.*140"):
        OrderPreservingSampler(9, batch_size=8, rank=0, world_size=2)
    with pytest.raises(ValueError, match="every step has 2 samples for 3 ranks"):
        OrderPreservingSampler(8, batch_size=2, rank=0, world_size=3)
    OrderPreservingSampler(9, batch_size=8, rank=0, world_size=2, drop_last=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, but is 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, but is 2.5"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank is 2, but ranks go from 0 to 1"),
        ({"batch_size": 4, "seed": -1}, "seed must be at least 0"),
        ({"batch_size": 4, "empty": "skip"}, "empty must be 'error' or 'yield'"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        OrderPreservingSampler(8, **arguments)


def test_the_state_of_another_run_is_refused():
    state = OrderPreservingSampler(8, batch_size=4).state_dict()
    with pytest.raises(ValueError, match=r"length 8, but this one has 9.*LS-141"):
        OrderPreservingSampler(9, batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks length, batch_size"):
        OrderPreservingSampler(8, batch_size=4).load_state_dict({"epoch": 0, "position": 0})


def test_loss_scale_turns_means_of_unequal_parts_into_the_mean():
    samples = torch.arange(5.0)
    samplers = [OrderPreservingSampler(5, 5, shuffle=False, rank=rank, world_size=2) for rank in range(2)]

    scaled = [samples[next(iter(sampler))].mean() * sampler.loss_scale() for sampler in samplers]

    assert [sampler.shares(0) for sampler in samplers] == [[3, 2], [3, 2]]
    assert sum(scaled) / 2 == samples.mean()


def test_a_second_pass_without_set_epoch_is_warned_of_once():
    sampler = OrderPreservingSampler(4, batch_size=2)
    first = list(sampler)
    with pytest.warns(UserWarning, match=r"epoch 0 begins a second time.*LS-142"):
        assert list(sampler) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(sampler)
        list(OrderPreservingSampler(4, batch_size=2, shuffle=False))


class Numbers(Dataset):
    """Sample i is i plus noise from every global generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_tracked_position_counts_what_the_loop_received_and_not_what_was_fetched_ahead(workers):
    sampler = OrderPreservingSampler(12, batch_size=2, seed=3)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    batches = sampler.track(loader)

    seen = [next(batches)[:, 0].tolist() for _ in range(2)]
    state = sampler.state_dict()

    assert state["position"] == 2
    resumed = OrderPreservingSampler(12, batch_size=2, seed=3)
    resumed.load_state_dict(state)
    rest = resumed.track(DataLoader(Numbers(), batch_sampler=resumed, num_workers=workers))
    assert seen + [batch[:, 0].tolist() for batch in rest] == one_process(12, 2, True, 3, 0, False)
    assert resumed.position == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_resumes_with_it(workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        sampler = OrderPreservingSampler(12, batch_size=2, seed=3)
        return stateful.StatefulDataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)

    first = loader()
    batches = iter(first)
    seen = [next(batches)[:, 0].tolist() for _ in range(2)]
    resumed = loader()
    resumed.load_state_dict(first.state_dict())

    assert seen + [batch[:, 0].tolist() for batch in resumed] == one_process(12, 2, True, 3, 0, False)


def test_augmentation_depends_on_the_sample_and_not_on_rank_or_worker():
    def samples(workers: int, world_size: int, epoch: int, batch_size: int) -> dict[int, list[float]]:
        torch.manual_seed(workers + world_size)  # the surroundings differ
        dataset = SampleSeeded(Numbers(), base=7)
        dataset.set_epoch(epoch)
        found = {}
        for rank in range(world_size):
            sampler = OrderPreservingSampler(dataset, batch_size, seed=1, rank=rank, world_size=world_size)
            for batch in DataLoader(dataset, batch_sampler=sampler, num_workers=workers, worker_init_fn=worker_init):
                found |= {int(row[0]): row[1:].tolist() for row in batch}
        return found

    reference = samples(workers=0, world_size=1, epoch=0, batch_size=4)

    assert len({tuple(noise) for noise in reference.values()}) == 12
    assert samples(workers=2, world_size=2, epoch=0, batch_size=6) == reference
    assert samples(workers=0, world_size=3, epoch=1, batch_size=4) != reference


def test_persistent_workers_see_the_new_epoch():
    dataset = SampleSeeded(Numbers(), base=7)
    loader = DataLoader(dataset, batch_size=12, num_workers=1, persistent_workers=True)
    noise = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        noise.append(torch.cat(list(loader)).tolist())
    assert noise[0] == noise[2] != noise[1]


def test_sample_rng_leaves_the_generators_as_they_were():
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(2).tolist(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    with sample_rng(0, 0, 5):
        first = torch.rand(()), random.random()
    with sample_rng(0, 0, 5):
        assert (torch.rand(()), random.random()) == first
    assert (torch.rand(2).tolist(), random.random()) == expected


def test_sample_seeds_are_fixed_for_all_time_and_all_different():
    assert sample_seed(0, 0, 0) == 2602329642018764132  # printf sample/0/0/0 | b2sum -l 64, little-endian, halved
    seeds = {sample_seed(base, epoch, index) for base in range(8) for epoch in range(8) for index in range(64)}
    assert len(seeds) == 8 * 8 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)


class Streams(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([torch.rand(()).item(), random.random()], dtype=torch.float64)


def test_worker_init_separates_workers_of_ranks_that_were_seeded_alike(monkeypatch):
    def draws(rank: int) -> list[float]:
        monkeypatch.setenv("RANK", str(rank))
        torch.manual_seed(0)
        loader = DataLoader(Streams(), batch_size=1, num_workers=2, worker_init_fn=worker_init)
        return torch.cat(list(loader)).flatten().tolist()

    zero, one = draws(0), draws(1)
    assert len({*zero, *one}) == 8
    assert draws(0) == zero


def _draw_after_seeding() -> tuple:
    generator = seed_everything(5)
    weights = torch.rand(2).tolist()
    data = random.random(), torch.rand(2, generator=generator).tolist()
    seed_rank_streams(5)
    return weights, data, torch.rand(2).tolist()


def test_seed_everything_seeds_the_model_equally_and_the_data_by_rank(ranks):
    zero, one = ranks.run(_draw_after_seeding)
    assert zero[0] == one[0]
    assert zero[1][0] != one[1][0] and zero[1][1] != one[1][1]
    assert zero[2] != one[2]
    assert ranks.run(_draw_after_seeding) == [zero, one]


def _default_rank() -> list[list[int]]:
    return list(OrderPreservingSampler(8, batch_size=4, shuffle=False))


def test_rank_and_world_size_are_those_of_the_group(ranks):
    assert ranks.run(_default_rank) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_before_the_group_exists_torchruns_environment_counts(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _default_rank() == [[2, 3], [6, 7]]


def test_a_seed_that_is_none_is_refused():
    with pytest.raises(ValueError, match="seed must be a whole number"):
        seed_everything(-1)


def test_the_package_offers_it():
    assert lockstep.data.OrderPreservingSampler is OrderPreservingSampler
