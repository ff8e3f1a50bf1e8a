// Parameters and plans written down in one line, and random ones, for the tests of core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "core/bucket_plan.h"
#include "core/bucket_planner.h"

namespace lockstep {

inline constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

inline ParamSpec dense(int64_t numel, int kind = 0, int64_t element_size = 4) {
  return {.numel = numel, .element_size = element_size, .kind = kind, .sparse = false};
}

inline ParamSpec sparse(int64_t numel, int kind = 0) {
  return {.numel = numel, .element_size = 4, .kind = kind, .sparse = true};
}

inline BucketGroup group(std::initializer_list<size_t> params, int64_t limit_bytes = kUnlimited) {
  BucketGroup result{.params = {}, .limit_bytes = limit_bytes};
  for (const size_t i : params) result.params.push_back(param_id(i));
  return result;
}

/// Plain numbers: they are easy to compare and GoogleTest can print them.
template <typename Id>
std::vector<int> numbers(const std::vector<Id>& ids) {
  std::vector<int> result;
  for (const Id id : ids) result.push_back(static_cast<int>(index(id)));
  return result;
}

inline std::vector<std::vector<int>> members(const std::vector<BucketGroup>& groups) {
  std::vector<std::vector<int>> result;
  for (const BucketGroup& one : groups) result.push_back(numbers(one.params));
  return result;
}

/// Bucket i holds the parameters sizes[0] + ... + sizes[i - 1] and following, of one element each.
inline BucketPlan plan_with_bucket_sizes(std::initializer_list<size_t> sizes) {
  std::vector<ParamSpec> params;
  std::vector<BucketGroup> groups;
  for (const size_t size : sizes) {
    groups.push_back(group({}));
    for (size_t i = 0; i < size; ++i) {
      groups.back().params.push_back(param_id(params.size()));
      params.push_back(dense(1));
    }
  }
  return {params, std::move(groups)};
}

/// A source of random cases that are equal on every machine: the standard's distributions differ between libraries.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  /// Smaller than `bound`, which must be positive.
  uint64_t below(uint64_t bound) { return engine_() % bound; }
  /// At least `low`, at most `high`.
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(below(static_cast<uint64_t>(high - low) + 1));
  }
  bool one_in(uint64_t n) { return below(n) == 0; }

  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

  std::vector<ParamId> permutation(size_t n) {
    std::vector<ParamId> order;
    for (size_t i = 0; i < n; ++i) order.push_back(param_id(i));
    shuffle(order);
    return order;
  }

  /// Up to 40 parameters of up to three kinds (elements of 4, 2 and 8 bytes), some empty, some sparse.
  std::vector<ParamSpec> params() {
    constexpr int64_t kElementSizes[] = {4, 2, 8};
    std::vector<ParamSpec> result(below(41));
    for (ParamSpec& spec : result) {
      const uint64_t kind = below(3);
      spec = dense(one_in(5) ? 0 : between(1, 100), static_cast<int>(kind), kElementSizes[kind]);
      spec.sparse = one_in(12);
    }
    return result;
  }

  /// Up to four limits of the size of one to some twenty parameters; sometimes none is ever reached.
  BucketLimits limits() {
    BucketLimits result(1 + below(4));
    for (int64_t& limit : result) limit = one_in(6) ? kUnlimited : between(1, 4000);
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace lockstep
