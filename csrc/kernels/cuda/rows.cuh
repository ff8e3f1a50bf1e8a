// Rows of matrices, read and written a few elements at once, and the matrix that a block is about.
#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/power_iteration.h"

namespace lockstep::cuda {
namespace {

constexpr int kWide = 4;  // elements that a lane holds of one row

template <typename State, typename Grad>
__device__ State as_state(Grad value) {
  if constexpr (sizeof(State) == sizeof(double)) {
    return value;
  } else {
    return as_float(value);
  }
}

template <typename Grad, typename State>
__device__ Grad from_state(State value) {
  if constexpr (sizeof(State) == sizeof(double)) {
    return value;
  } else {
    return from_float<Grad>(value);
  }
}

/// Up to kWide neighbours at once.
template <typename T>
struct alignas(sizeof(T) * kWide > 16 ? 16 : sizeof(T) * kWide) Few {
  T values[kWide];
};

template <typename T>
__device__ bool allows_few(const T* row, int64_t cols) {
  return cols % kWide == 0 && reinterpret_cast<uintptr_t>(row) % alignof(Few<T>) == 0;
}

/// Reads [col, col + kWide) of a row; zeros from `end` on.
template <typename T>
__device__ Few<T> read(const T* row, int64_t col, int64_t end, bool whole) {
  Few<T> few;
  if (whole && col + kWide <= end) return *reinterpret_cast<const Few<T>*>(row + col);
#pragma unroll
  for (int k = 0; k < kWide; ++k) few.values[k] = col + k < end ? row[col + k] : from_float<T>(0.0F);
  return few;
}

template <typename T>
__device__ void write(T* row, int64_t col, int64_t end, bool whole, const Few<T>& few) {
  if (whole && col + kWide <= end) {
    *reinterpret_cast<Few<T>*>(row + col) = few;
    return;
  }
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    if (col + k < end) row[col + k] = few.values[k];
  }
}

/// The last matrix whose first tile, by `first`, is not behind this block's.
__device__ const FactoredMatrix& matrix_of_block(const FactoredBucket& bucket, int32_t FactoredMatrix::*first) {
  int low = 0;
  int high = bucket.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (bucket.matrices[middle].*first <= static_cast<int32_t>(blockIdx.x)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return bucket.matrices[low];
}

}  // namespace
}  // namespace lockstep::cuda
