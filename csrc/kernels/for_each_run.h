// Splits the work on a bucket evenly over threads, whatever the sizes of its segments. CPU only.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <span>

#include "kernels/segment.h"

namespace lockstep {

/// Work per thread below which starting another thread costs more than it brings.
inline constexpr int64_t kElementsPerThread = 32768;

/// Calls `run(segment, first, count)` so that every element is covered once.
template <typename Run>
void for_each_run(std::span<const Segment> segments, const Run& run) {
  int64_t total = 0;
  for (const Segment& segment : segments) total += segment.numel;
  if (total <= kElementsPerThread || at::get_num_threads() == 1 || at::in_parallel_region()) {
    for (const Segment& segment : segments) run(segment, 0, segment.numel);
    return;
  }
  at::parallel_for(0, total, kElementsPerThread, [&](int64_t begin, int64_t end) {
    int64_t start = 0;  // place of the segment in the concatenation of all
    for (const Segment& segment : segments) {
      const int64_t first = std::max(begin - start, int64_t{0});
      const int64_t last = std::min(end - start, segment.numel);
      if (first < last) run(segment, first, last - first);
      start += segment.numel;
      if (start >= end) break;
    }
  });
}

template <typename T>
T* advance(void* grad, int64_t first) {
  return grad == nullptr ? nullptr : static_cast<T*>(grad) + first;
}

}  // namespace lockstep
