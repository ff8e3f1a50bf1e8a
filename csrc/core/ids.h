// Names for the two things that are numbered: parameters and buckets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

/// A trainable parameter, by its place in the list the engine was built with.
enum class ParamId : uint32_t {};

/// A bucket, by its place in the order of sending; equal on all ranks.
enum class BucketId : uint32_t {};

constexpr size_t index(ParamId id) { return static_cast<size_t>(id); }
constexpr size_t index(BucketId id) { return static_cast<size_t>(id); }
constexpr ParamId param_id(size_t i) { return static_cast<ParamId>(i); }
constexpr BucketId bucket_id(size_t i) { return static_cast<BucketId>(i); }

}  // namespace lockstep
