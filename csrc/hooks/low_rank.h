// Where the matrices of one bucket lie while they are compressed, and the numbers their factors start from.
#pragma once

#include <ATen/core/MT19937RNGEngine.h>

#include <cstdint>
#include <string>
#include <vector>

#include "buckets/grad_bucket.h"
#include "hooks/named_memory.h"
#include "kernels/power_iteration.h"

namespace lockstep {

/// How far a matrix is compressed, and which ones are.
struct LowRankLimits {
  int64_t rank = 1;
  double min_compression_rate = 2;
};

/// One bucket, split into matrices to be compressed and the rest.
struct LowRankLayout {
  Matrices matrices;                ///< Groups in the order in which shapes appear in the bucket.
  std::vector<Run> rest;            ///< Of the bucket, in a flat tensor of their own.
  std::vector<NamedSlice> errors;   ///< By parameter, in the flat tensor of all M.
  std::vector<NamedSlice> factors;  ///< By parameter, in the flat tensor of all Q.
  int64_t m_numel = 0;
  int64_t p_numel = 0;
  int64_t q_numel = 0;
  int64_t rest_numel = 0;
  int64_t numel_before = 0;  ///< Elements of gradients.
  int64_t numel_after = 0;   ///< Elements on the wire, of one direction.
};

/// One matrix per parameter: its first dimension by all others. Compressed is what that makes smaller by more than the
/// minimum rate: (rows + cols) * rank * rate < rows * cols, with the rank cut to the smaller side. Torch's rule.
[[nodiscard]] LowRankLayout matrix_per_parameter(const BucketMembers& members, const LowRankLimits& limits);

/// One square matrix for the whole bucket, filled up with zeros.
[[nodiscard]] LowRankLayout matrix_per_bucket(const BucketMembers& members, int64_t numel, const LowRankLimits& limits);

/// Normally distributed numbers, the same on every rank: those that torch's hook draws for the same seed, which come
/// from numpy's RandomState(seed).randint(10**9) as the seed of torch's generator.
class FactorSeeds {
 public:
  explicit FactorSeeds(int64_t seed) : engine_(static_cast<uint64_t>(seed)) {}

  /// The seed of the next bucket.
  uint64_t next();

  /// 624 words and a position, as numpy's RandomState.get_state() gives them.
  [[nodiscard]] at::Tensor state() const;
  /// @throws lockstep::Error  not 625 numbers.
  void set_state(const at::Tensor& state);

 private:
  at::mt19937 engine_;
};

/// Fills Q of every group.
/// @param as_one  matrices of one shape are drawn as one tensor, else one after the other.
void draw_factors(const at::Tensor& q, const std::vector<MatrixGroup>& groups, uint64_t seed, bool as_one);

}  // namespace lockstep
