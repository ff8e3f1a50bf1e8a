#include "hooks/low_rank.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "comm/host_copy.h"
#include "core/error.h"

namespace lockstep {
namespace {

constexpr uint32_t kSeeds = 1'000'000'000;
constexpr int64_t kEngineWords = 624;

void place(std::vector<MatrixGroup>& groups, LowRankLayout& layout) {
  for (MatrixGroup& group : groups) {
    group.m = layout.m_numel;
    group.p = layout.p_numel;
    group.q = layout.q_numel;
    layout.m_numel += group.count * group.rows * group.cols;
    layout.p_numel += group.count * group.rows * group.rank;
    layout.q_numel += group.count * group.cols * group.rank;
  }
}

}  // namespace

LowRankLayout matrix_per_parameter(const BucketMembers& members, const LowRankLimits& limits) {
  LowRankLayout layout;
  std::vector<std::vector<size_t>> of_group;
  for (size_t i = 0; i < members.params.size(); ++i) {
    const auto numel = static_cast<int64_t>(members.lengths[i]);
    const int64_t rows = members.sizes[i].empty() ? 1 : members.sizes[i].front();
    const int64_t cols = numel / rows;
    const int64_t rank = std::min({rows, cols, limits.rank});
    const int64_t compressed = (rows + cols) * rank;
    layout.numel_before += numel;
    if (static_cast<double>(compressed) * limits.min_compression_rate >= static_cast<double>(numel)) {
      layout.rest.push_back({static_cast<int64_t>(members.offsets[i]), layout.rest_numel, numel});
      layout.rest_numel += numel;
      layout.numel_after += numel;
      continue;
    }
    layout.numel_after += compressed;
    const auto same = std::find_if(layout.matrices.groups.begin(), layout.matrices.groups.end(),
                                   [&](const MatrixGroup& g) { return g.rows == rows && g.cols == cols; });
    const auto at = static_cast<size_t>(same - layout.matrices.groups.begin());
    if (same == layout.matrices.groups.end()) {
      layout.matrices.groups.push_back({.rows = rows, .cols = cols, .rank = rank, .count = 0});
      of_group.emplace_back();
    }
    ++layout.matrices.groups[at].count;
    of_group[at].push_back(i);
  }
  place(layout.matrices.groups, layout);
  for (size_t g = 0; g < layout.matrices.groups.size(); ++g) {
    const MatrixGroup& group = layout.matrices.groups[g];
    for (size_t k = 0; k < of_group[g].size(); ++k) {
      const size_t i = of_group[g][k];
      const int64_t m = group.m + static_cast<int64_t>(k) * group.rows * group.cols;
      const int64_t q = group.q + static_cast<int64_t>(k) * group.cols * group.rank;
      layout.matrices.runs.push_back({static_cast<int64_t>(members.offsets[i]), m, group.rows * group.cols});
      layout.errors.push_back({members.names[i], m, group.rows * group.cols});
      layout.factors.push_back({members.names[i], q, group.cols * group.rank});
    }
  }
  return layout;
}

LowRankLayout matrix_per_bucket(const BucketMembers& members, int64_t numel, const LowRankLimits& limits) {
  LowRankLayout layout;
  auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(numel)));
  while (side * side < numel) ++side;
  const int64_t rank = std::min(side, limits.rank);
  layout.matrices.groups.push_back({.rows = side, .cols = side, .rank = rank, .count = 1});
  place(layout.matrices.groups, layout);
  layout.matrices.runs.push_back({0, 0, numel});
  layout.errors = slices_of(members);
  // Filled up with zeros, but what is left out there is not.
  const std::string key = fmt::format("[{}]", fmt::join(members.names, " "));
  layout.errors.push_back({key, numel, layout.m_numel - numel});
  // The factor belongs to these parameters in this order; of another bucket it would be a random start.
  layout.factors.push_back({key, 0, layout.q_numel});
  layout.numel_before = numel;
  layout.numel_after = layout.p_numel + layout.q_numel;
  return layout;
}

uint64_t FactorSeeds::next() {
  constexpr uint32_t kMask = (uint32_t{1} << 30) - 1;  // the smallest that covers the range
  uint32_t value = 0;
  do {
    value = engine_() & kMask;
  } while (value >= kSeeds);
  return value;
}

// Not by the stream operators of std::mt19937: they have crashed in Python processes of one machine with torch 2.11 and
// GCC 13, for a reason that is not known.

at::Tensor FactorSeeds::state() const {
  const at::mt19937_data_pod data = engine_.data();
  at::Tensor state = at::empty({kEngineWords + 1}, at::dtype(at::kLong));
  auto* out = state.mutable_data_ptr<int64_t>();
  std::copy(data.state_.begin(), data.state_.end(), out);
  out[kEngineWords] = data.left_ == 1 ? kEngineWords : data.next_;  // all of them have been used
  return state;
}

void FactorSeeds::set_state(const at::Tensor& state) {
  if (state.numel() != kEngineWords + 1 || state.scalar_type() != at::kLong || !state.is_cpu()) {
    fail(Code::kHookState, "the random state of a comm hook must be {} integers, but has {} of type {}.",
         kEngineWords + 1, state.numel(), c10::toString(state.scalar_type()));
  }
  const at::Tensor dense = state.contiguous();
  const auto* in = dense.const_data_ptr<int64_t>();
  at::mt19937_data_pod data = engine_.data();
  std::transform(in, in + kEngineWords, data.state_.begin(), [](int64_t word) { return static_cast<uint32_t>(word); });
  data.next_ = static_cast<uint32_t>(in[kEngineWords]);
  data.left_ = static_cast<int>(kEngineWords - in[kEngineWords] + 1);
  engine_.set_data(data);
  if (!engine_.is_valid()) {
    fail(Code::kHookState, "the random state of a comm hook has position {}, which must be from 0 to {}.",
         in[kEngineWords], kEngineWords);
  }
}

void draw_factors(const at::Tensor& q, const std::vector<MatrixGroup>& groups, uint64_t seed, bool as_one) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const at::Tensor drawn = q.is_cpu() ? q : staging(q.numel(), q.scalar_type(), q.device()).view_as(q);
  for (const MatrixGroup& group : groups) {
    at::Tensor all = group.q_of(drawn);
    if (as_one) {
      all.copy_(at::randn(all.sizes(), generator, all.options()));
      continue;
    }
    for (int64_t i = 0; i < group.count; ++i) {
      const at::Tensor one = all.narrow(0, i, 1);
      one.copy_(at::randn(one.sizes(), generator, one.options()));
    }
  }
  if (!q.is_cpu()) q.copy_(drawn, /*non_blocking=*/true);
}

}  // namespace lockstep
