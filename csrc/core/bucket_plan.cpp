#include "core/bucket_plan.h"

#include <fmt/format.h>

#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace lockstep {
namespace {

void check_spec(const ParamSpec& spec, size_t number) {
  if (spec.numel < 0) {
    throw std::invalid_argument(
        fmt::format("parameter {} has {} elements; the number must not be negative", number, spec.numel));
  }
  if (spec.element_size <= 0) {
    throw std::invalid_argument(
        fmt::format("parameter {} has elements of {} bytes; the size must be positive", number, spec.element_size));
  }
}

/// Every member exists and matches the first one, which stands for the group.
void check_group(std::span<const ParamSpec> params, const BucketGroup& group, size_t number) {
  if (group.params.empty()) {
    throw std::invalid_argument(fmt::format("bucket {} has no parameter; leave such a group out", number));
  }
  for (const ParamId id : group.params) {
    if (index(id) >= params.size()) {
      throw std::invalid_argument(fmt::format("bucket {} names parameter {}, but there are only {} parameters", number,
                                              index(id), params.size()));
    }
    const ParamSpec& spec = params[index(id)];
    const ParamSpec& first = params[index(group.params.front())];
    if (spec.sparse && group.params.size() > 1) {
      throw std::invalid_argument(
          fmt::format("parameter {} has sparse gradients and must be alone in its bucket, but bucket {} has {} "
                      "parameters",
                      index(id), number, group.params.size()));
    }
    if (spec.kind != first.kind) {
      throw std::invalid_argument(
          fmt::format("parameter {} is of kind {}, but bucket {} is of kind {}: a bucket has one dtype and device",
                      index(id), spec.kind, number, first.kind));
    }
    if (spec.element_size != first.element_size) {
      throw std::invalid_argument(
          fmt::format("parameter {} has elements of {} bytes, but bucket {} of the same kind has elements of {} bytes",
                      index(id), spec.element_size, number, first.element_size));
    }
  }
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

BucketPlan::BucketPlan(std::span<const ParamSpec> params, std::vector<BucketGroup> groups, int64_t alignment_bytes) {
  if (alignment_bytes < 1) {
    throw std::invalid_argument(fmt::format("alignment_bytes is {}; it must be positive", alignment_bytes));
  }
  for (size_t i = 0; i < params.size(); ++i) check_spec(params[i], i);

  slots_.resize(params.size());
  buckets_.reserve(groups.size());
  std::vector<bool> placed(params.size(), false);

  for (BucketGroup& group : groups) {
    const size_t number = buckets_.size();
    check_group(params, group, number);

    const ParamSpec& first = params[index(group.params.front())];
    // The smallest number of elements that is a whole multiple of the alignment in bytes.
    const int64_t alignment = alignment_bytes / std::gcd(alignment_bytes, first.element_size);
    const int64_t max_numel = std::numeric_limits<int64_t>::max() / first.element_size;

    Bucket bucket;
    bucket.limit_bytes = group.limit_bytes;
    bucket.kind = first.kind;
    bucket.sparse = first.sparse;
    for (const ParamId id : group.params) {
      if (placed[index(id)]) {
        throw std::invalid_argument(
            fmt::format("parameter {} is in bucket {} and again in bucket {}; it must be in exactly one", index(id),
                        index(slots_[index(id)].bucket), number));
      }
      placed[index(id)] = true;

      const int64_t numel = params[index(id)].numel;
      if (numel > max_numel - alignment - bucket.numel) {
        throw std::invalid_argument(
            fmt::format("parameter {} makes bucket {} larger than 2^63 - 1 bytes", index(id), number));
      }
      // No gap behind the last slot: a bucket of one gradient is as long as the gradient.
      const int64_t offset = round_up(bucket.numel, alignment);
      slots_[index(id)] = Slot{.bucket = bucket_id(number), .offset = offset, .numel = numel};
      bucket.payload_numel += numel;
      if (!bucket.sparse) bucket.numel = offset + numel;
    }
    bucket.params = std::move(group.params);
    buckets_.push_back(std::move(bucket));
  }

  for (size_t i = 0; i < params.size(); ++i) {
    if (!placed[i]) throw std::invalid_argument(fmt::format("parameter {} is in no bucket", i));
  }
}

}  // namespace lockstep
