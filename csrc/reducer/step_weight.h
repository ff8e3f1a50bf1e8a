// How much the gradients of this rank count: in samples or tokens, per micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "buckets/grad_buffers.h"

namespace lockstep {

/// The weight of each micro-batch, and what gradients accumulated under other weights must be multiplied by.
///
/// Between micro-batches `.grad` is sum(w g) / w, with the weight w of the last one (its unit): autograd can add the
/// next gradient to it once it has been brought to that one's unit, and packing multiplies by w in the pass that it
/// makes anyway. Expects the reducer's mutex to be held.
class StepWeight {
 public:
  /// For micro-batches from the next forward on. Empty: plain means, as if every weight were 1.
  void set(std::optional<double> weight);
  /// A weight has been set: means are divided by the sum of weights.
  [[nodiscard]] bool used() const { return weight_.has_value(); }

  /// Brings what has been accumulated to the unit of the coming micro-batch; one pass over the gradients where the two
  /// differ. Where the coming one counts for nothing, what is there is put aside, so that gradients which may be NaN
  /// do not get into it.
  void begin_forward(const ParamList& params);
  /// A gradient has arrived: the micro-batch of the last forward counts.
  void note_gradient() {
    if (!pending_) return;
    pending_ = false;
    total_ += current_;
  }
  /// Puts back what `begin_forward` has put aside of this parameter.
  void restore(const at::Tensor& param, ParamId id);

  /// What packing multiplies gradients by.
  [[nodiscard]] double unit() const { return unit_; }
  /// Sum over the micro-batches of this pass.
  [[nodiscard]] double total() const { return total_; }
  void end_pass();

 private:
  std::optional<double> weight_;
  double current_ = 1.0;  // of the last forward
  double unit_ = 1.0;
  double total_ = 0.0;
  bool pending_ = false;
  std::vector<at::Tensor> aside_;  // by ParamId; empty: nothing
};

/// Multiplies the gradients of `ids` by `divided_by` over the sum of `weights`; by zero where that sum is. The host
/// does not wait for a device.
/// @param weights     of all ranks, float64, where the exchange was.
/// @param divided_by  what the sum over ranks has been divided by already.
void divide_by_weights(const ParamList& params, const std::vector<ParamId>& ids, const at::Tensor& weights,
                       double divided_by);

}  // namespace lockstep
