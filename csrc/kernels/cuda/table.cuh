// A list of runs, cut into tiles, that travels in a kernel's parameters; each block finds the run of its tile by
// itself.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#if CUDART_VERSION < 12010
#error "lockstep: the kernels need CUDA 12.1 or newer, where kernel parameters may be 32 KB"
#endif

namespace lockstep::cuda {
namespace {

constexpr int kThreads = 256;

/// A gradient, or a part of one. The kernel says what offset and length count.
struct Run {
  char* grad;  // null: zeros
  uint32_t offset;
  uint32_t length;
};

/// What a kernel is told, in its parameters. `first_tile` increases strictly from 0.
template <int kCapacity>
struct Table {
  char* bucket;
  double scale;
  int num_runs;
  bool to_bucket;
  uint32_t first_tile[kCapacity];
  Run runs[kCapacity];
};

// A small table is cheaper to launch with; the largest fills the 32764 bytes that parameters may have.
constexpr int kSmall = 64;
constexpr int kMedium = 256;
constexpr int kLarge = 1024;
constexpr int kLargest = 1600;
static_assert(sizeof(Table<kLargest>) <= 32764);

/// The run that `tile` belongs to, which is the last one that does not start after it. All threads of the block look at
/// once and get the same answer.
///
/// The table is read as memory, though it lies in the parameters. Read as constants, by any search, each step would
/// miss the cache of constants in every fresh block: on an H200 that halved the bandwidth of buckets with 1000
/// gradients.
template <int kCapacity>
__device__ int run_of(const Table<kCapacity>& table, uint32_t tile) {
  const uint32_t* first_tile = table.first_tile;
  asm volatile("" : "+l"(first_tile));  // hides from the compiler where that is
  constexpr int kReads = (kCapacity + kThreads - 1) / kThreads;
  uint32_t starts[kReads];
#pragma unroll
  for (int k = 0; k < kReads; ++k) {
    const int index = k * kThreads + static_cast<int>(threadIdx.x);
    starts[k] = index < table.num_runs ? first_tile[index] : ~uint32_t{0};
  }
  int passed = 0;
#pragma unroll
  for (const uint32_t start : starts) passed += start <= tile;

  constexpr int kWarps = kThreads / 32;
  __shared__ int passed_by[kWarps];
  int of_warp = passed;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) of_warp += __shfl_xor_sync(~0U, of_warp, step);
  if (threadIdx.x % 32 == 0) passed_by[threadIdx.x / 32] = of_warp;
  __syncthreads();
  int all = 0;
#pragma unroll
  for (const int of_one : passed_by) all += of_one;
  return all - 1;
}

}  // namespace
}  // namespace lockstep::cuda
