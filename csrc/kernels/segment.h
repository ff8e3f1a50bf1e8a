// Where a gradient lies, in its own memory and in its bucket. Standard C++: device code includes it too.
#pragma once

#include <cstdint>

namespace lockstep {

/// One gradient in the two places it can be: its own memory, and its slot in the bucket.
/// Both sides are dense runs of `numel` elements in the same order, on the bucket's device, and of its dtype where a
/// kernel does not say otherwise.
struct Segment {
  void* grad = nullptr;  ///< Null stands for a gradient that is absent: zeros are packed, nothing is unpacked.
  int64_t offset = 0;    ///< Of the slot, in elements.
  int64_t numel = 0;     ///< In elements.
};

}  // namespace lockstep
