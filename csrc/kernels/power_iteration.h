// One step of the power iteration on the matrices of a bucket: what PowerSGD calculates between its collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/runs.h"

namespace lockstep {

/// Matrices M of one shape, each [rows, cols], with factors P [rows, rank] and Q [cols, rank]. They lie one behind the
/// other, so that a batched product serves all of them.
struct MatrixGroup {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t rank = 0;
  int64_t count = 0;
  int64_t m = 0;  ///< First element in the flat tensor of all M, like the next two.
  int64_t p = 0;
  int64_t q = 0;

  [[nodiscard]] at::Tensor m_of(const at::Tensor& flat) const { return view(flat, m, rows, cols); }
  [[nodiscard]] at::Tensor p_of(const at::Tensor& flat) const { return view(flat, p, rows, rank); }
  [[nodiscard]] at::Tensor q_of(const at::Tensor& flat) const { return view(flat, q, cols, rank); }

 private:
  [[nodiscard]] at::Tensor view(const at::Tensor& flat, int64_t first, int64_t height, int64_t width) const {
    return flat.narrow(0, first, count * height * width).view({count, height, width});
  }
};

/// The matrices of one bucket.
struct Matrices {
  std::vector<MatrixGroup> groups;
  std::vector<Run> runs;  ///< Of the bucket, in the flat tensor of all M: one per matrix, in the order of the groups.
};

/// Flat tensors of one bucket, on its device. Type of the last four: kFloat, or kDouble where the gradients are.
struct FactorTensors {
  at::Tensor gradients;  ///< The bucket's memory, any floating type.
  at::Tensor m;          ///< The error between steps, M within one.
  at::Tensor p;
  at::Tensor q;
  at::Tensor flags;  ///< One per matrix: not zero where a gradient is not finite. To be summed over ranks, like P.
};

/// The three parts of a step, in their order. Results on a device are the same for the same input, in every run; the
/// host does not wait, and the number of launches does not depend on the number of matrices.
class PowerIteration {
 public:
  struct Settings {
    double epsilon = 0;  ///< See `orthonormalize`.
    bool error_feedback = true;
  };

  virtual ~PowerIteration() = default;

  /// For buckets like `bucket`, on its device.
  static std::unique_ptr<PowerIteration> make(const Matrices& matrices, const at::Tensor& bucket, Settings settings);

  /// Q is made orthonormal, M = error + gradients, P = M Q. Gradients that are not finite are left out of M and
  /// flagged.
  virtual void first(const FactorTensors& tensors) = 0;
  /// With P and flags summed over ranks: P is made orthonormal, Q = M' P. Returns false, on all ranks alike, when
  /// values were not finite and the host knows it: M is the error again then, and the step is over. A device goes on,
  /// with the flags of those matrices set.
  virtual bool second(const FactorTensors& tensors) = 0;
  /// With the mean of Q over ranks: gradients = P Q', and what that leaves out stays in M. Flagged matrices become NaN,
  /// and their M the error it was.
  virtual void finish(const FactorTensors& tensors) = 0;
};

namespace cuda {
/// The same for whatever is not on the CPU: from kernels/cuda, or a clear refusal in a build without CUDA.
std::unique_ptr<PowerIteration> make_power_iteration(const Matrices& matrices, const at::Tensor& bucket,
                                                     PowerIteration::Settings settings);
}  // namespace cuda

}  // namespace lockstep
