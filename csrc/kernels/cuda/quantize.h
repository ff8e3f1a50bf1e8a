// Block-wise 8-bit quantization of a bucket on a CUDA device: raw pointers and a stream, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/pack.h"

namespace lockstep::cuda {

/// How a bucket is cut. A block is 256 elements, a record what one rank sums: the codes of `blocks_per_rank` blocks, a
/// byte each, and behind them the fp32 scale of every block.
struct BlockTable {
  const int32_t* filled = nullptr;  ///< On the device, like the next one: elements of the block that are gradients.
  const uint32_t* ids = nullptr;    ///< Of the first element of every block, for random numbers. Null: nearest.
  int64_t blocks_per_rank = 0;
  int32_t ranks = 0;
};

// Each function is one launch on `stream`; nothing waits. The rules of rounding are those of kernels/quantize.h, bit
// for bit.

/// records[r] = the blocks of rank r, of bucket + error. @param error  fp32, as long as the bucket, becomes what
/// rounding has left out; or null.
[[nodiscard]] cudaError_t launch_quantize(const BlockTable& table, const void* bucket, Element element, float* error,
                                          uint32_t key, char* records, cudaStream_t stream);

/// record = the sum of `received`, one record of each rank, quantized again. @param error  added to, what rounding has
/// left out; may end before the blocks do, after `error_numel` elements; or null. @param first_block  of the record.
[[nodiscard]] cudaError_t launch_sum_records(const BlockTable& table, const char* received, int64_t first_block,
                                             float* error, int64_t error_numel, uint32_t key, char* record,
                                             cudaStream_t stream);

/// bucket[k] = the value of its code in `records`, one of each rank.
[[nodiscard]] cudaError_t launch_dequantize(const BlockTable& table, const char* records, void* bucket, Element element,
                                            int64_t numel, cudaStream_t stream);

}  // namespace lockstep::cuda
