// A warp per block of 256 elements: the largest value is found and the codes are written without leaving registers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/quantize.h"
#include "kernels/quantization.h"

namespace lockstep::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr int kPerLane = static_cast<int>(kQuantizationBlock) / kLanes;
constexpr int kTogether = 4;  // codes in one access; a lane has two such groups, half a block apart
constexpr float kLargestCode = 127;

/// Which element of its block a lane's k-th one is.
__device__ int place(int lane, int k) {
  return k / kTogether * (kLanes * kTogether) + lane * kTogether + k % kTogether;
}

__device__ int64_t block_of_warp() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; }

__device__ int64_t record_bytes(const BlockTable& table) {
  return table.blocks_per_rank * (kQuantizationBlock + static_cast<int64_t>(sizeof(float)));
}

/// The codes of a block within a record, and the scale of one.
template <typename Byte>
__device__ Byte* codes_at(Byte* record, int64_t block) {
  return record + block * kQuantizationBlock;
}
template <typename Byte>
__device__ auto* scale_at(Byte* record, const BlockTable& table, int64_t block) {
  using Scale = std::conditional_t<std::is_const_v<Byte>, const float, float>;
  return reinterpret_cast<Scale*>(record + table.blocks_per_rank * kQuantizationBlock) + block;
}

/// The values that a lane's codes stand for.
__device__ void read_values(const char* record, const BlockTable& table, int64_t block, float (&values)[kPerLane]) {
  const int lane = threadIdx.x % kLanes;
  const float scale = *scale_at(record, table, block);
#pragma unroll
  for (int k = 0; k < kPerLane; k += kTogether) {
    const char4 codes = *reinterpret_cast<const char4*>(codes_at(record, block) + place(lane, k));
    values[k] = __fmul_rn(codes.x, scale);
    values[k + 1] = __fmul_rn(codes.y, scale);
    values[k + 2] = __fmul_rn(codes.z, scale);
    values[k + 3] = __fmul_rn(codes.w, scale);
  }
}

/// Quantizes the block that a warp holds; `values` becomes what that has left out, where it is a number.
/// @param id  of the block's first element, or null: to the nearest code.
__device__ void write_codes(float (&values)[kPerLane], const uint32_t* id, uint32_t key, char* record,
                            const BlockTable& table, int64_t block) {
  const int lane = threadIdx.x % kLanes;
  float largest = 0;
  bool finite = true;
#pragma unroll
  for (const float value : values) {
    largest = fmaxf(largest, fabsf(value));
    finite = finite && isfinite(value);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, step));
  const float scale = __all_sync(~0U, finite) ? __fdiv_rn(largest, kLargestCode) : NAN;
  if (lane == 0) *scale_at(record, table, block) = scale;

  signed char codes[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    float steps = __fdiv_rn(values[k], scale);
    if (!isfinite(steps)) steps = 0;
    if (id == nullptr) {
      steps = rintf(steps);
    } else {
      const uint32_t word = mixed((*id + static_cast<uint32_t>(place(lane, k))) ^ key);
      steps = floorf(__fadd_rn(steps, chance_of(word)));
    }
    steps = fminf(fmaxf(steps, -kLargestCode), kLargestCode);
    codes[k] = static_cast<signed char>(steps);
    const float left = __fsub_rn(values[k], __fmul_rn(steps, scale));
    values[k] = isfinite(left) ? left : 0.0F;
  }
#pragma unroll
  for (int k = 0; k < kPerLane; k += kTogether) {
    *reinterpret_cast<char4*>(codes_at(record, block) + place(lane, k)) =
        make_char4(codes[k], codes[k + 1], codes[k + 2], codes[k + 3]);
  }
}

template <typename Grad>
__global__ void __launch_bounds__(kThreads)
    quantize(const BlockTable table, const Grad* bucket, float* error, uint32_t key, char* records) {
  const int64_t block = block_of_warp();
  if (block >= table.blocks_per_rank * table.ranks) return;
  const int lane = threadIdx.x % kLanes;
  const int filled = table.filled[block];
  const int64_t first = block * kQuantizationBlock;
  float values[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int at = place(lane, k);
    values[k] = at < filled ? as_float(bucket[first + at]) : 0.0F;
    if (error != nullptr && at < filled) values[k] = __fadd_rn(values[k], error[first + at]);
  }
  char* record = records + block / table.blocks_per_rank * record_bytes(table);
  write_codes(values, table.ids == nullptr ? nullptr : table.ids + block, key, record, table,
              block % table.blocks_per_rank);
  if (error == nullptr) return;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int at = place(lane, k);
    if (at < filled) error[first + at] = values[k];
  }
}

__global__ void __launch_bounds__(kThreads)
    sum_records(const BlockTable table, const char* received, int64_t first_block, float* error, int64_t error_numel,
                uint32_t key, char* record) {
  const int64_t block = block_of_warp();
  if (block >= table.blocks_per_rank) return;
  float sums[kPerLane] = {};
  for (int rank = 0; rank < table.ranks; ++rank) {
    float values[kPerLane];
    read_values(received + rank * record_bytes(table), table, block, values);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) sums[k] = __fadd_rn(sums[k], values[k]);
  }
  write_codes(sums, table.ids == nullptr ? nullptr : table.ids + first_block + block, key, record, table, block);
  if (error == nullptr) return;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int64_t at = block * kQuantizationBlock + place(threadIdx.x % kLanes, k);
    if (at < error_numel) error[at] = __fadd_rn(error[at], sums[k]);
  }
}

template <typename Grad>
__global__ void __launch_bounds__(kThreads)
    dequantize(const BlockTable table, const char* records, Grad* bucket, int64_t numel) {
  const int64_t block = block_of_warp();
  if (block >= table.blocks_per_rank * table.ranks) return;
  float values[kPerLane];
  read_values(records + block / table.blocks_per_rank * record_bytes(table), table, block % table.blocks_per_rank,
              values);
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int64_t at = block * kQuantizationBlock + place(threadIdx.x % kLanes, k);
    if (at < numel) bucket[at] = from_float<Grad>(values[k]);
  }
}

// ---- on the host ----

unsigned blocks_for(int64_t blocks) { return static_cast<unsigned>((blocks + kWarps - 1) / kWarps); }

/// Calls `launch` with a null pointer of the bucket's type.
template <typename Launch>
cudaError_t with_element(Element element, const Launch& launch) {
  switch (element) {
    case Element::kFloat:
      launch(static_cast<float*>(nullptr));
      break;
    case Element::kDouble:
      launch(static_cast<double*>(nullptr));
      break;
    case Element::kHalf:
      launch(static_cast<__half*>(nullptr));
      break;
    case Element::kBFloat16:
      launch(static_cast<__nv_bfloat16*>(nullptr));
      break;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_quantize(const BlockTable& table, const void* bucket, Element element, float* error, uint32_t key,
                            char* records, cudaStream_t stream) {
  return with_element(element, [&]<typename Grad>(Grad*) {
    quantize<<<blocks_for(table.blocks_per_rank * table.ranks), kThreads, 0, stream>>>(
        table, static_cast<const Grad*>(bucket), error, key, records);
  });
}

cudaError_t launch_sum_records(const BlockTable& table, const char* received, int64_t first_block, float* error,
                               int64_t error_numel, uint32_t key, char* record, cudaStream_t stream) {
  sum_records<<<blocks_for(table.blocks_per_rank), kThreads, 0, stream>>>(table, received, first_block, error,
                                                                          error_numel, key, record);
  return cudaGetLastError();
}

cudaError_t launch_dequantize(const BlockTable& table, const char* records, void* bucket, Element element,
                              int64_t numel, cudaStream_t stream) {
  return with_element(element, [&]<typename Grad>(Grad*) {
    dequantize<<<blocks_for(table.blocks_per_rank * table.ranks), kThreads, 0, stream>>>(
        table, records, static_cast<Grad*>(bucket), numel);
  });
}

}  // namespace lockstep::cuda
