// Makes the columns of every factor orthonormal: one block per matrix, which keeps the order of its sums.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/power_iteration.h"

namespace lockstep::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kLanes = 32;

/// The sum over the block of the values of one column, which a thread in `width` holds; for each column by itself.
template <typename State>
__device__ State sum_of_column(State value, int width, State (*shared)[kLanes]) {
  const int lane = threadIdx.x % kLanes;
  for (int step = kLanes / 2; step >= width; step /= 2) value += __shfl_xor_sync(~0U, value, step);
  __syncthreads();  // the last sums have been read
  if (lane < width) shared[threadIdx.x / kLanes][lane] = value;
  __syncthreads();
  State sum = 0;
  for (int warp = 0; warp < kThreads / kLanes; ++warp) sum += shared[warp][lane % width];
  return sum;
}

/// Something between -1 and 1 for a column that has to be made up.
__device__ float made_up(uint32_t row, uint32_t col) {
  uint32_t word = row * 0x9e3779b9U ^ (col + 1) * 0x85ebca6bU;
  word ^= word >> 16;
  word *= 0xc2b2ae35U;
  word ^= word >> 13;
  return static_cast<float>(word >> 8) * (2.0F / (1 << 24)) - 1.0F;
}

/// Modified Gram-Schmidt, once, on a factor of which neighbouring lanes hold neighbouring columns of a row, as they lie
/// in memory. Removing column i from those behind it and the products for column i + 1 take one sweep over the rows.
template <typename State>
class GramSchmidt {
 public:
  __device__ GramSchmidt(State* factor, int64_t rows, int rank, State (*shared)[kLanes])
      : factor_(factor), rows_(rows), rank_(rank), shared_(shared) {
    while (width_ < rank) width_ *= 2;
    col_ = static_cast<int>(threadIdx.x) % width_;
  }

  /// With `replaces`, a column that the ones before it leave next to nothing of is made up; only the next run makes
  /// that one orthogonal.
  __device__ void run(State epsilon, bool replaces) {
    State sum = 0;     // of column i with this one
    State square = 0;  // of this one as it came
    for_rows([&](int64_t /*row*/, State value) {
      sum += of_column(0, value) * value;
      square += value * value;
    });
    sum = sum_of_column(sum, width_, shared_);
    square = sum_of_column(square, width_, shared_);

    constexpr State kDependent = sizeof(State) == 8 ? 1e-24 : 1e-10;
    for (int i = 0; i < rank_; ++i) {
      const State own = of_column(i, sum);
      const bool gone = replaces && own <= kDependent * of_column(i, square);
      const State norm = sqrt(own) + epsilon;
      const State to_unit = norm == State(0) ? State(0) : State(1) / norm;
      const State share = gone ? State(0) : sum * to_unit;
      const int next = min(i + 1, width_ - 1);
      sum = 0;
      for_rows([&](int64_t row, State value) {
        if (col_ == i) value = gone ? static_cast<State>(made_up(static_cast<uint32_t>(row), i)) : value * to_unit;
        const State unit = of_column(i, value);
        if (col_ > i) value -= share * unit;
        if (row >= rows_) value = 0;
        if (col_ >= i && col_ < rank_ && row < rows_) factor_[row * rank_ + col_] = value;
        sum += of_column(next, value) * value;
      });
      sum = sum_of_column(sum, width_, shared_);
    }
  }

 private:
  /// What the lane of that column of the same row holds.
  __device__ State of_column(int col, State value) const { return __shfl_sync(~0U, value, col, width_); }

  /// Calls `body(row, value of this lane's column)`, with all lanes of a warp together. Several values are on their way
  /// at once: one block has to hide the latency of memory by itself.
  template <typename Body>
  __device__ void for_rows(const Body& body) const {
    constexpr int kAhead = 8;
    const int64_t step = kThreads / width_;
    for (int64_t first = threadIdx.x / width_; first - threadIdx.x / width_ < rows_; first += kAhead * step) {
      State values[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int64_t row = first + k * step;
        values[k] = col_ < rank_ && row < rows_ ? factor_[row * rank_ + col_] : State(0);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) body(first + k * step, values[k]);
    }
  }

  State* factor_;
  int64_t rows_;
  int rank_;
  State (*shared_)[kLanes];
  int width_ = 1;  // lanes of a row
  int col_ = 0;
};

/// A block per matrix.
template <typename State>
__global__ void __launch_bounds__(kThreads)
    orthonormalize(const __grid_constant__ FactoredBucket bucket, Factor which, double epsilon) {
  const FactoredMatrix& matrix = bucket.matrices[blockIdx.x];
  State* flag = at<State>(bucket.flags, blockIdx.x);
  const bool is_p = which == Factor::kP;
  State* factor = is_p ? at<State>(bucket.p, matrix.p) : at<State>(bucket.q, matrix.q);
  const int64_t rows = is_p ? matrix.rows : matrix.cols;
  if (!is_p) {
    if (threadIdx.x == 0) *flag = 0;
  } else {
    bool finite = isfinite(*flag) && *flag == State(0);
    for (int64_t k = threadIdx.x; k < rows * matrix.rank; k += kThreads) finite = finite && isfinite(factor[k]);
    if (!__syncthreads_and(finite)) {
      if (threadIdx.x == 0) *flag = 1;
      return;
    }
  }
  __shared__ State shared[kThreads / kLanes][kLanes];
  // Up to two columns exactly as torch does, which also leaves a column of zeros alone.
  const bool twice = matrix.rank > 2;
  GramSchmidt<State> process(factor, rows, matrix.rank, shared);
  process.run(twice ? State(0) : static_cast<State>(epsilon), twice);
  if (twice) process.run(State(0), false);
}

}  // namespace

cudaError_t launch_orthonormalize(const FactoredBucket& bucket, Factor factor, double epsilon, cudaStream_t stream) {
  const auto kernel = bucket.element == Element::kDouble ? &orthonormalize<double> : &orthonormalize<float>;
  return launch_on(stream, kernel, blocks(bucket.count), kThreads, bucket, factor, epsilon);
}

}  // namespace lockstep::cuda
