// One step of the power iteration on all matrices of a bucket at once, on a CUDA device: raw pointers, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/pack.h"

namespace lockstep::cuda {

/// A matrix M [rows, cols] with factors P [rows, rank] and Q [cols, rank], all row by row, and how it is cut into
/// tiles. Lies in device memory, so that a launch costs the same for any number of matrices.
struct FactoredMatrix {
  int64_t gradient = 0;  ///< First element in the bucket, which holds the first `filled` elements of M.
  int64_t filled = 0;
  int64_t m = 0;  ///< First element in the flat tensor of all M, like the next two.
  int64_t p = 0;
  int64_t q = 0;
  int64_t partial = 0;  ///< First element in the partial sums of Q: [row_chunks, cols, rank].
  int64_t rows = 0;
  int64_t cols = 0;
  int32_t rank = 0;
  int32_t col_tiles = 0;
  int32_t row_chunks = 0;
  int32_t first_row_tile = 0;  ///< Tiles of rows in the matrices before this one, and so on.
  int32_t first_q_tile = 0;
  int32_t first_sum_tile = 0;
};

/// All matrices of a bucket, and their tensors on the device.
struct FactoredBucket {
  const FactoredMatrix* matrices = nullptr;  ///< On the device.
  int32_t count = 0;
  int32_t row_tiles = 0;
  int32_t q_tiles = 0;
  int32_t sum_tiles = 0;
  int32_t max_rank = 0;       ///< At most `kMaxRank`.
  void* gradients = nullptr;  ///< The bucket; `element` says of what.
  void* m = nullptr;          ///< This and what follows: fp32, or fp64 where the bucket is.
  void* p = nullptr;
  void* q = nullptr;
  void* flags = nullptr;    ///< One per matrix: not zero where a value of any rank is not finite.
  void* partial = nullptr;  ///< Of `place_tiles`' size.
  Element element = Element::kFloat;
};

inline constexpr int32_t kMaxRank = 32;

/// Cuts the matrices into tiles: fills the members of each that say how, and the bucket's counts.
/// @return  elements of `FactoredBucket::partial`.
int64_t place_tiles(FactoredMatrix* matrices, FactoredBucket& bucket);

/// Which factor is made orthonormal. Before P, the flags of all ranks and P itself are looked at.
enum class Factor { kP, kQ };

// Launches, whatever the number of matrices: one for each function on `stream`, two for `launch_second_product`, one
// per eight columns for `launch_first_product`. Nothing waits.

/// The columns of every P or Q become orthonormal: the rules are those of `lockstep::orthonormalize`, but for more than
/// two columns by Gram and Schmidt too, twice, with a column that depends on those before it replaced by another.
/// Q: zeroes the flags. P: sets the flag of every matrix whose P is not finite.
[[nodiscard]] cudaError_t launch_orthonormalize(const FactoredBucket& bucket, Factor factor, double epsilon,
                                                cudaStream_t stream);

/// M = error + gradients, P = M Q; flags what is not finite, and leaves it out. The error lies in M, or is none.
[[nodiscard]] cudaError_t launch_first_product(const FactoredBucket& bucket, bool error_feedback, cudaStream_t stream);

/// Q = M' P.
[[nodiscard]] cudaError_t launch_second_product(const FactoredBucket& bucket, cudaStream_t stream);

/// gradients = P Q', and with error feedback M -= P Q'. A flagged matrix becomes NaN, and its M the error it was.
[[nodiscard]] cudaError_t launch_approximation(const FactoredBucket& bucket, bool error_feedback, cudaStream_t stream);

}  // namespace lockstep::cuda
