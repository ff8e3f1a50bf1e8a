#include "core/bucket_planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace lockstep {
namespace {

void check_limits(const BucketLimits& limits) {
  if (limits.empty()) throw std::invalid_argument("there is no bucket limit; give at least one, in bytes");
  for (size_t i = 0; i < limits.size(); ++i) {
    if (limits[i] <= 0) {
      throw std::invalid_argument(fmt::format("bucket limit {} is {} bytes; it must be positive", i, limits[i]));
    }
  }
}

/// `sum` plus the bytes of one parameter. Saturates, because "no limit" is the largest integer.
int64_t add_bytes(int64_t sum, const ParamSpec& spec) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(spec.numel, spec.element_size, &bytes) || __builtin_add_overflow(sum, bytes, &sum)) {
    return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

/// A group, and what its place in the order of sending depends on.
struct FilledGroup {
  BucketGroup group;
  size_t first = 0;  // places of the first and the last member in the order of filling
  size_t last = 0;
  bool has_elements = false;

  void add(ParamId id, size_t place, bool with_elements) {
    if (group.params.empty()) first = place;
    last = place;
    has_elements = has_elements || with_elements;
    group.params.push_back(id);
  }
};

std::vector<FilledGroup> fill(std::span<const ParamSpec> params, std::span<const ParamId> order,
                              const BucketLimits& limits) {
  struct OpenGroup {
    FilledGroup filled;
    int64_t bytes = 0;
    size_t limit = 0;  // place in `limits`
  };
  std::map<int, OpenGroup> open_groups;  // by kind
  std::vector<FilledGroup> closed;

  for (size_t place = 0; place < order.size(); ++place) {
    const ParamId id = order[place];
    const ParamSpec& spec = params[index(id)];
    if (spec.sparse) {
      closed.emplace_back().add(id, place, spec.numel > 0);
      continue;
    }
    OpenGroup& open = open_groups[spec.kind];
    open.filled.add(id, place, spec.numel > 0);
    open.bytes = add_bytes(open.bytes, spec);
    if (open.bytes >= limits[open.limit]) {
      open.filled.group.limit_bytes = limits[open.limit];
      closed.push_back(std::exchange(open.filled, {}));
      open.bytes = 0;
      open.limit = std::min(open.limit + 1, limits.size() - 1);
    }
  }
  for (auto& [kind, open] : open_groups) {
    if (open.filled.group.params.empty()) continue;
    open.filled.group.limit_bytes = limits[open.limit];
    closed.push_back(std::move(open.filled));
  }
  return closed;
}

/// Sorts by `is_before`, but groups without elements first: nothing is sent for them, so they must not be the last.
template <typename Comparison>
std::vector<BucketGroup> in_order_of_sending(std::vector<FilledGroup> filled, Comparison is_before) {
  std::ranges::sort(filled, [&](const FilledGroup& a, const FilledGroup& b) {
    return a.has_elements != b.has_elements ? b.has_elements : is_before(a, b);
  });
  std::vector<BucketGroup> groups;
  groups.reserve(filled.size());
  for (FilledGroup& one : filled) groups.push_back(std::move(one.group));
  return groups;
}

void check_permutation(std::span<const ParamId> arrival, size_t num_params) {
  if (arrival.size() != num_params) {
    throw std::invalid_argument(
        fmt::format("the arrival order has {} entries for {} parameters", arrival.size(), num_params));
  }
  std::vector<bool> seen(num_params, false);
  for (size_t i = 0; i < arrival.size(); ++i) {
    const size_t number = index(arrival[i]);
    if (number >= num_params) {
      throw std::invalid_argument(fmt::format("entry {} of the arrival order names parameter {}, but there are only {}",
                                              i, number, num_params));
    }
    if (seen[number]) {
      throw std::invalid_argument(
          fmt::format("entry {} of the arrival order names parameter {} for the second time", i, number));
    }
    seen[number] = true;
  }
}

}  // namespace

BucketLimits chosen_limits(int64_t total_bytes) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  constexpr int64_t kLeast = 25 * kMiB;
  constexpr int64_t kMost = 100 * kMiB;
  constexpr int64_t kMostOfLarge = 400 * kMiB;
  if (total_bytes <= 4 * kLeast) return {kMiB, kLeast};
  return {std::max(std::clamp(total_bytes / 4, kLeast, kMost), std::min(total_bytes / 16, kMostOfLarge))};
}

std::vector<BucketGroup> group_by_registration(std::span<const ParamSpec> params, const BucketLimits& limits) {
  check_limits(limits);
  std::vector<ParamId> order(params.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = param_id(i);

  return in_order_of_sending(fill(params, order, limits),
                             [](const FilledGroup& a, const FilledGroup& b) { return a.first > b.first; });
}

std::vector<BucketGroup> group_by_arrival(std::span<const ParamSpec> params, std::span<const ParamId> arrival,
                                          const BucketLimits& limits) {
  check_limits(limits);
  check_permutation(arrival, params.size());

  return in_order_of_sending(fill(params, arrival, limits),
                             [](const FilledGroup& a, const FilledGroup& b) { return a.last < b.last; });
}

std::vector<BucketGroup> with_short_tail(std::span<const ParamSpec> params, std::vector<BucketGroup> groups) {
  constexpr int64_t kLeast = int64_t{8} << 20;
  if (groups.empty()) return groups;
  const auto bytes = [params](std::span<const ParamId> ids) {
    return std::accumulate(ids.begin(), ids.end(), int64_t{0},
                           [params](int64_t sum, ParamId id) { return add_bytes(sum, params[index(id)]); });
  };
  BucketGroup& last = groups.back();
  const int64_t all = bytes(last.params);
  size_t cut = last.params.size();
  for (int64_t tail = 0; cut > 0 && tail < all / 4;) tail = add_bytes(tail, params[index(last.params[--cut])]);
  const std::span<const ParamId> head = std::span(last.params).first(cut);
  if (all < kLeast || bytes(head) < all / 8) return groups;

  BucketGroup tail{.params = {last.params.begin() + static_cast<ptrdiff_t>(cut), last.params.end()},
                   .limit_bytes = last.limit_bytes};
  last.params.resize(cut);
  groups.push_back(std::move(tail));
  return groups;
}

}  // namespace lockstep
