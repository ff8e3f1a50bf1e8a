// Shares the samples of each step out over the ranks, in the order that one process would see. For torch::data.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/data/samplers/base.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"
#include "lockstep/process_group.h"

namespace lockstep {

/// `torch::data::samplers::DistributedRandomSampler` repeats samples where ranks do not divide the data, and its steps
/// hold other samples for each number of ranks. Here a step of n ranks with batches of b has the samples that one
/// process with batches of n * b would have: rank r takes the r-th part, and where the last batch cannot be divided,
/// the first ranks take one more (weigh their loss with `loss_scale`). The order depends on seed and epoch only, and is
/// that of `lockstep.data.OrderPreservingSampler` in Python.
///
///     auto loader = torch::data::make_data_loader(
///         data, lockstep::OrderPreservingSampler(size, group), torch::data::DataLoaderOptions(32));  // 32 a rank
///
/// Copies share the epoch: keep one to call `set_epoch` on before each pass over the loader.
class OrderPreservingSampler : public torch::data::samplers::Sampler<> {
 public:
  struct Order {
    bool shuffle = true;     ///< Else 0, 1, 2, ...
    uint64_t seed = 0;       ///< Equal on all ranks.
    bool drop_last = false;  ///< Leave out a last step that is smaller than the others.
  };

  OrderPreservingSampler(size_t length, int rank, int world_size, Order order)
      : length_(length),
        rank_(static_cast<size_t>(rank)),
        world_(static_cast<size_t>(world_size)),
        order_(order),
        epoch_(std::make_shared<int64_t>(0)) {
    if (rank < 0 || rank >= world_size) {
      fail(Code::kFrontArgument, "a sampler for rank {} of {}: ranks go from 0 to {}.", rank, world_size,
           world_size - 1);
    }
    draw();
  }
  OrderPreservingSampler(size_t length, const ProcessGroup& group, Order order)
      : OrderPreservingSampler(length, group.rank(), group.size(), order) {}
  OrderPreservingSampler(size_t length, const ProcessGroup& group)
      : OrderPreservingSampler(length, group.rank(), group.size(), Order{}) {}

  /// Of the coming passes: takes effect at `reset`, which a data loader calls in `begin()`.
  void set_epoch(int64_t epoch) { *epoch_ = epoch; }
  [[nodiscard]] int64_t epoch() const { return *epoch_; }

  void reset(std::optional<size_t> new_size = std::nullopt) override {
    if (new_size) length_ = *new_size;
    position_ = 0;
    draw();
  }

  /// @param batch_size  of one rank; a step has `world_size` times as many samples.
  /// @throws lockstep::Error  on every rank: the last step has fewer samples than there are ranks.
  std::optional<std::vector<size_t>> next(size_t batch_size) override {
    const size_t step = std::min(batch_size * world_, length_ - position_);
    if (step == 0 || (order_.drop_last && step < batch_size * world_)) return std::nullopt;
    if (step < world_) {
      fail(Code::kFrontArgument,
           "[rank {}] the last step has {} samples for {} ranks, so that some would get none and could not take part. "
           "Set "
           "drop_last, or take another batch size.",
           rank_, step, world_);
    }
    const auto [first, count] = part(step, rank_);
    const auto begin = indices_.begin() + static_cast<std::ptrdiff_t>(position_ + first);
    position_ += step;
    return std::vector<size_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
  }

  /// What this rank multiplies its mean loss with in `step` (from 0) of an epoch, so that the mean over ranks is the
  /// mean over samples: 1 wherever all ranks have equally many.
  [[nodiscard]] double loss_scale(size_t step, size_t batch_size) const {
    const size_t start = std::min(step * batch_size * world_, length_);
    const size_t samples = std::min(batch_size * world_, length_ - start);
    if (samples == 0) return 1;
    return static_cast<double>(part(samples, rank_).second * world_) / static_cast<double>(samples);
  }

  /// Where the pass is, for a checkpoint: epoch and position.
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("position", torch::tensor({*epoch_, static_cast<int64_t>(position_)}, torch::kInt64),
                  /*is_buffer=*/true);
  }
  void load(torch::serialize::InputArchive& archive) override {
    at::Tensor saved;
    archive.read("position", saved, /*is_buffer=*/true);
    *epoch_ = saved[0].item<int64_t>();
    reset();
    position_ = static_cast<size_t>(saved[1].item<int64_t>());
  }

 private:
  /// First sample and number of samples of `rank` in a step of `samples`.
  [[nodiscard]] std::pair<size_t, size_t> part(size_t samples, size_t rank) const {
    const size_t each = samples / world_;
    const size_t more = samples % world_;
    return {rank * each + std::min(rank, more), each + (rank < more ? 1 : 0)};
  }

  void draw() {
    indices_.resize(length_);
    for (size_t i = 0; i < length_; ++i) indices_[i] = i;
    if (!order_.shuffle) return;
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(order_.seed + static_cast<uint64_t>(*epoch_));
    const at::Tensor drawn = at::randperm(static_cast<int64_t>(length_), generator, at::TensorOptions(at::kLong));
    const auto* values = drawn.const_data_ptr<int64_t>();
    for (size_t i = 0; i < length_; ++i) indices_[i] = static_cast<size_t>(values[i]);
  }

  size_t length_;
  size_t rank_;
  size_t world_;
  Order order_;
  std::shared_ptr<int64_t> epoch_;
  size_t position_ = 0;
  std::vector<size_t> indices_;
};

}  // namespace lockstep
