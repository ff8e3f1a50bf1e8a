// Counts the bytes that torch's CPU allocator hands out: the memory of tensors, exactly, and of nothing else.
#pragma once

#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

namespace lockstep::testing {

/// Told by the allocator of every block that comes and goes while it is pushed as the profiler of a thread
/// (c10::DebugInfoKind::PROFILER_STATE); backward passes started there report to it too.
///
/// It is a profiler that records no operators: torch casts whatever is pushed there to ProfilerStateBase.
/// Blocks that were there before are unknown to torch and their end is not counted: free them first.
class AllocationMeter final : public torch::profiler::impl::ProfilerStateBase {
 public:
  AllocationMeter() : ProfilerStateBase(memory_only()) {}

  [[nodiscard]] int64_t live_bytes() const {
    const std::scoped_lock lock(mutex_);
    return live_;
  }

  /// The largest value of `live_bytes()` so far.
  [[nodiscard]] int64_t peak_bytes() const {
    const std::scoped_lock lock(mutex_);
    return peak_;
  }

  /// `change` in bytes, negative for a block that is freed.
  void reportMemoryUsage(void* /*block*/, int64_t change, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    const std::scoped_lock lock(mutex_);
    live_ += change;
    peak_ = std::max(peak_, live_);
  }

  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

 private:
  static torch::profiler::impl::ProfilerConfig memory_only() {
    torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::Disabled);
    config.profile_memory = true;
    return config;
  }

  mutable std::mutex mutex_;
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

}  // namespace lockstep::testing
