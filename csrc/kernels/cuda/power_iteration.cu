// PowerSGD's products with thin factors. All of them are bound by reading M: a warp takes several rows or columns, so
// that what it reads of the factors, from the caches, serves all of them.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/power_iteration.h"
#include "kernels/cuda/rows.cuh"

namespace lockstep::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr int kStride = kLanes * kWide;  // elements of a row that a warp holds
constexpr int kWarpRows = 4;             // rows of a warp
constexpr int kTileRows = kWarps * kWarpRows;
constexpr int kTileCols = kStride;  // columns of a block in the second product
constexpr int kChunkRows = 1024;    // rows that one block sums up there

// ---- on the device ----

/// Columns [first, first + kRank) of a row of a factor; zeros from `rank` on.
template <typename State, int kRank>
__device__ void read_factor(const State* factor, int64_t row, int rank, int first, State (&values)[kRank]) {
#pragma unroll
  for (int r = 0; r < kRank; ++r) values[r] = first + r < rank ? factor[row * rank + first + r] : State(0);
}

/// What M is before the first product.
enum class Before { kError, kNothing, kSum };

/// M = error + gradients, unless it is that already, and columns [first, first + kRank) of P = M Q. A block per
/// kTileRows rows, a warp per kWarpRows of them.
template <typename Grad, typename State, int kRank>
__global__ void __launch_bounds__(kThreads)
    first_product(const __grid_constant__ FactoredBucket bucket, Before before, int first) {
  const FactoredMatrix& matrix = matrix_of_block(bucket, &FactoredMatrix::first_row_tile);
  const int64_t cols = matrix.cols;
  const int rank = matrix.rank;
  if (first >= rank) return;
  const int lane = threadIdx.x % kLanes;
  const int64_t first_row = int64_t{static_cast<int32_t>(blockIdx.x) - matrix.first_row_tile} * kTileRows +
                            int64_t{threadIdx.x / kLanes} * kWarpRows;
  const Grad* gradients = at<Grad>(bucket.gradients, matrix.gradient);
  State* m = at<State>(bucket.m, matrix.m);
  const State* q = at<State>(bucket.q, matrix.q);
  const bool few_of_m = allows_few(m, cols);
  const bool few_of_gradients = allows_few(gradients, cols);

  State sums[kWarpRows][kRank] = {};
  bool finite = true;
  for (int64_t col = lane * kWide; col < cols; col += kStride) {
    Few<State> held[kWarpRows];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int64_t row = first_row + i;
      if (row >= matrix.rows) {
        held[i] = {};
        continue;
      }
      const int64_t start = row * cols;
      const int64_t filled = min(cols, max(int64_t{0}, matrix.filled - start));
      held[i] = before == Before::kNothing ? Few<State>{} : read(m + start, col, cols, few_of_m);
      if (before == Before::kSum) continue;
      const Few<Grad> grads = read(gradients + start, col, filled, few_of_gradients);
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
        const State value = as_state<State>(grads.values[k]);
        const bool good = isfinite(value);
        finite = finite && good;
        held[i].values[k] += good ? value : State(0);
      }
      write(m + start, col, cols, few_of_m, held[i]);
    }
#pragma unroll
    for (int k = 0; k < kWide; ++k) {
      if (col + k >= cols) break;
      State factors[kRank];
      read_factor<State, kRank>(q, col + k, rank, first, factors);
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
        for (int r = 0; r < kRank; ++r) sums[i][r] += held[i].values[k] * factors[r];
      }
    }
  }

  if (!finite) *at<State>(bucket.flags, &matrix - bucket.matrices) = State(1);
  State* p = at<State>(bucket.p, matrix.p);
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
    for (int r = 0; r < kRank; ++r) {
      State sum = sums[i][r];
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0U, sum, step);
      if (lane == 0 && first + r < rank && first_row + i < matrix.rows) p[(first_row + i) * rank + first + r] = sum;
    }
  }
}

/// Partial sums of Q = M' P over kChunkRows rows, of kRank columns of Q. A block per kTileCols columns of M, its warps
/// take the rows in turns.
template <typename State, int kRank>
__global__ void __launch_bounds__(kThreads) second_product(const __grid_constant__ FactoredBucket bucket) {
  const FactoredMatrix& matrix = matrix_of_block(bucket, &FactoredMatrix::first_q_tile);
  const int32_t tile = static_cast<int32_t>(blockIdx.x) - matrix.first_q_tile;
  const int64_t chunk = tile / matrix.col_tiles;
  const int64_t cols = matrix.cols;
  const int rank = matrix.rank;
  const int first_factor = static_cast<int>(blockIdx.y) * kRank;
  if (first_factor >= rank) return;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int64_t col = int64_t{tile % matrix.col_tiles} * kTileCols + lane * kWide;
  const int64_t end = min(matrix.rows, (chunk + 1) * kChunkRows);
  const State* m = at<State>(bucket.m, matrix.m);
  const State* p = at<State>(bucket.p, matrix.p);
  const bool few = allows_few(m, cols);

  State sums[kWide][kRank] = {};
  constexpr int kAhead = 4;  // rows on their way
  for (int64_t first = chunk * kChunkRows + warp; first < end; first += kWarps * kAhead) {
    Few<State> held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t row = first + i * kWarps;
      held[i] = row < end ? read(m + row * cols, col, cols, few) : Few<State>{};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t row = first + i * kWarps;
      if (row >= end) break;
      State factors[kRank];
      read_factor<State, kRank>(p, row, rank, first_factor, factors);
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
#pragma unroll
        for (int r = 0; r < kRank; ++r) sums[k][r] += held[i].values[k] * factors[r];
      }
    }
  }

  // One warp after the other, so that the order of the sum is always the same.
  __shared__ State total[kRank][kTileCols + 1];
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
#pragma unroll
        for (int r = 0; r < kRank; ++r) {
          State& sum = total[r][lane * kWide + k];
          sum = turn == 0 ? sums[k][r] : sum + sums[k][r];
        }
      }
    }
    __syncthreads();
  }
  const int64_t first_col = int64_t{tile % matrix.col_tiles} * kTileCols;
  const auto num_cols = static_cast<int>(min(int64_t{kTileCols}, cols - first_col));
  State* partial = at<State>(bucket.partial, matrix.partial) + (chunk * cols + first_col) * rank;
  const int num_factors = min(kRank, rank - first_factor);
  for (int k = threadIdx.x; k < num_cols * num_factors; k += kThreads) {
    partial[k / num_factors * rank + first_factor + k % num_factors] = total[k % num_factors][k / num_factors];
  }
}

/// Q from its partial sums. A thread per element.
template <typename State>
__global__ void __launch_bounds__(kThreads) sum_partials(const __grid_constant__ FactoredBucket bucket) {
  const FactoredMatrix& matrix = matrix_of_block(bucket, &FactoredMatrix::first_sum_tile);
  const int64_t numel = matrix.cols * matrix.rank;
  const int64_t k = int64_t{static_cast<int32_t>(blockIdx.x) - matrix.first_sum_tile} * kThreads + threadIdx.x;
  if (k >= numel) return;
  const State* partial = at<State>(bucket.partial, matrix.partial) + k;
  State sum = 0;
  for (int chunk = 0; chunk < matrix.row_chunks; ++chunk) sum += partial[chunk * numel];
  at<State>(bucket.q, matrix.q)[k] = sum;
}

/// gradients = P Q', M -= P Q'. The tiles of first_product.
template <typename Grad, typename State, int kRank>
__global__ void __launch_bounds__(kThreads)
    approximation(const __grid_constant__ FactoredBucket bucket, bool error_feedback) {
  const FactoredMatrix& matrix = matrix_of_block(bucket, &FactoredMatrix::first_row_tile);
  const int64_t cols = matrix.cols;
  const int rank = matrix.rank;
  const int lane = threadIdx.x % kLanes;
  const int64_t first_row = int64_t{static_cast<int32_t>(blockIdx.x) - matrix.first_row_tile} * kTileRows +
                            int64_t{threadIdx.x / kLanes} * kWarpRows;
  Grad* gradients = at<Grad>(bucket.gradients, matrix.gradient);
  State* m = at<State>(bucket.m, matrix.m);
  const State* p = at<State>(bucket.p, matrix.p);
  const State* q = at<State>(bucket.q, matrix.q);
  const bool few_of_m = allows_few(m, cols);
  const bool few_of_gradients = allows_few(gradients, cols);
  const bool flagged = *at<State>(bucket.flags, &matrix - bucket.matrices) != State(0);

  for (int64_t col = lane * kWide; col < cols; col += kStride) {
    Few<State> product[kWarpRows] = {};
    for (int first = 0; first < rank; first += kRank) {
      State of_row[kWarpRows][kRank];
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        read_factor<State, kRank>(p, min(first_row + i, matrix.rows - 1), rank, first, of_row[i]);
      }
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
        if (col + k >= cols) break;
        State factors[kRank];
        read_factor<State, kRank>(q, col + k, rank, first, factors);
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
          for (int r = 0; r < kRank; ++r) product[i].values[k] += of_row[i][r] * factors[r];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int64_t row = first_row + i;
      if (row >= matrix.rows) break;
      const int64_t start = row * cols;
      const int64_t filled = min(cols, max(int64_t{0}, matrix.filled - start));
      if (flagged) {
        const Few<Grad> grads = read(gradients + start, col, filled, few_of_gradients);
#pragma unroll
        for (int k = 0; k < kWide; ++k) {
          const State value = as_state<State>(grads.values[k]);
          product[i].values[k] = isfinite(value) ? value : State(0);
        }
      }
      if (error_feedback) {
        Few<State> left = read(m + start, col, cols, few_of_m);
#pragma unroll
        for (int k = 0; k < kWide; ++k) left.values[k] -= product[i].values[k];
        write(m + start, col, cols, few_of_m, left);
      }
      Few<Grad> mean;
#pragma unroll
      for (int k = 0; k < kWide; ++k) mean.values[k] = from_state<Grad>(flagged ? State(NAN) : product[i].values[k]);
      write(gradients + start, col, filled, few_of_gradients, mean);
    }
  }
}

// ---- on the host ----

constexpr int32_t kFactorColumns = 8;  // that a kernel holds at once, at most

/// Calls `launch` with the types of gradients and state, and how many columns of a factor to hold, which the compiler
/// must know.
template <typename Launch>
cudaError_t with_types(const FactoredBucket& bucket, const Launch& launch) {
  const auto of = [&]<typename Grad>() {
    if (bucket.max_rank == 1) return launch.template operator()<Grad, float, 1>();
    if (bucket.max_rank <= 4) return launch.template operator()<Grad, float, 4>();
    return launch.template operator()<Grad, float, kFactorColumns>();
  };
  switch (bucket.element) {
    case Element::kFloat:
      return of.template operator()<float>();
    case Element::kHalf:
      return of.template operator()<__half>();
    case Element::kBFloat16:
      return of.template operator()<__nv_bfloat16>();
    case Element::kDouble:
      return launch.template operator()<double, double, kFactorColumns>();
  }
  return cudaErrorInvalidValue;
}

/// The same where gradients take no part.
template <typename Launch>
cudaError_t with_state(FactoredBucket bucket, const Launch& launch) {
  if (bucket.element != Element::kDouble) bucket.element = Element::kFloat;
  return with_types(bucket, launch);
}

template <typename T>
int32_t pieces(T whole, T piece) {
  return static_cast<int32_t>((whole + piece - 1) / piece);
}

}  // namespace

int64_t place_tiles(FactoredMatrix* matrices, FactoredBucket& bucket) {
  int64_t partial = 0;
  bucket.row_tiles = bucket.q_tiles = bucket.sum_tiles = bucket.max_rank = 0;
  for (int32_t i = 0; i < bucket.count; ++i) {
    FactoredMatrix& matrix = matrices[i];
    matrix.col_tiles = pieces<int64_t>(matrix.cols, kTileCols);
    matrix.row_chunks = pieces<int64_t>(matrix.rows, kChunkRows);
    matrix.first_row_tile = bucket.row_tiles;
    matrix.first_q_tile = bucket.q_tiles;
    matrix.first_sum_tile = bucket.sum_tiles;
    matrix.partial = partial;
    bucket.row_tiles += pieces<int64_t>(matrix.rows, kTileRows);
    bucket.q_tiles += matrix.col_tiles * matrix.row_chunks;
    bucket.sum_tiles += pieces<int64_t>(matrix.cols * matrix.rank, kThreads);
    bucket.max_rank = std::max(bucket.max_rank, matrix.rank);
    partial += matrix.row_chunks * matrix.cols * matrix.rank;
  }
  return partial;
}

cudaError_t launch_first_product(const FactoredBucket& bucket, bool error_feedback, cudaStream_t stream) {
  return with_types(bucket, [&]<typename Grad, typename State, int kRank>() {
    Before before = error_feedback ? Before::kError : Before::kNothing;
    for (int first = 0; first < bucket.max_rank; first += kRank) {
      const cudaError_t status = launch_on(stream, &first_product<Grad, State, kRank>, blocks(bucket.row_tiles),
                                           kThreads, bucket, before, first);
      if (status != cudaSuccess) return status;
      before = Before::kSum;
    }
    return cudaSuccess;
  });
}

cudaError_t launch_second_product(const FactoredBucket& bucket, cudaStream_t stream) {
  return with_state(bucket, [&]<typename /*Grad*/, typename State, int kRank>() {
    const cudaError_t status = launch_on(stream, &second_product<State, kRank>,
                                         blocks(bucket.q_tiles, pieces(bucket.max_rank, kRank)), kThreads, bucket);
    if (status != cudaSuccess) return status;
    return launch_on(stream, &sum_partials<State>, blocks(bucket.sum_tiles), kThreads, bucket);
  });
}

cudaError_t launch_approximation(const FactoredBucket& bucket, bool error_feedback, cudaStream_t stream) {
  return with_types(bucket, [&]<typename Grad, typename State, int kRank>() {
    return launch_on(stream, &approximation<Grad, State, kRank>, blocks(bucket.row_tiles), kThreads, bucket,
                     error_feedback);
  });
}

}  // namespace lockstep::cuda
