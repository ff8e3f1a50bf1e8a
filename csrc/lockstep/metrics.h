// What a distributed program says and measures: once, and over all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <utility>

#include "lockstep/process_group.h"

namespace lockstep {

/// Prints a line, formatted by fmt, on rank 0 only; at once.
template <typename... Args>
void print0(const ProcessGroup& group, fmt::format_string<Args...> text, Args&&... args) {
  if (group.rank() != 0) return;
  fmt::print("{}\n", fmt::format(text, std::forward<Args>(args)...));
  std::fflush(stdout);
}

/// The same on stderr.
template <typename... Args>
void log0(const ProcessGroup& group, fmt::format_string<Args...> text, Args&&... args) {
  if (group.rank() == 0) fmt::print(stderr, "{}\n", fmt::format(text, std::forward<Args>(args)...));
}

/// The mean over ranks of `value`, each counted `weight` times: sum(weight * value) / sum(weight), one all-reduce in
/// float64. Give the number of samples behind a rank's value, and it is the mean over samples and no mean of means. A
/// rank of weight 0 takes part but does not count, whatever its value, NaN included. Collective.
/// @throws lockstep::Error  a weight is negative or not finite, or all are 0.
[[nodiscard]] double mean(const ProcessGroup& group, double value, double weight = 1);

/// The same for each element of a tensor on any device; float64, on `value`'s device. Ranks bring equal shapes.
[[nodiscard]] at::Tensor mean(const ProcessGroup& group, const at::Tensor& value, double weight = 1);

/// Gathers a metric over the batches of an epoch, then over the ranks.
class WeightedMean {
 public:
  /// @param value   mean over the `weight` samples of a batch.
  void add(double value, double weight = 1);
  /// Over everything added on all ranks since `reset`. Collective; a rank that added nothing takes part too.
  /// @throws lockstep::Error  nobody has added anything.
  [[nodiscard]] double reduce(const ProcessGroup& group) const;
  [[nodiscard]] double weight() const { return weight_; }  ///< Of this rank.
  void reset() { sum_ = weight_ = 0; }

 private:
  double sum_ = 0;
  double weight_ = 0;
};

}  // namespace lockstep
