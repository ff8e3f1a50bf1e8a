// The one kernel that moves a bucket's gradients: a list of runs, cut into tiles of equal size, one block per tile.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "kernels/cuda/pack.h"
#include "kernels/cuda/table.cuh"

namespace lockstep::cuda {
namespace {

constexpr uint32_t kTileBytes = kThreads * 4 * sizeof(uint4);  // one pass of a block over its tile at best

// Lengths and offsets on the device are counted in units of 2 bytes, which divide every element: one kernel copies all
// dtypes, and 32 bits reach far enough.
constexpr int64_t kUnit = 2;
constexpr uint32_t kTileUnits = kTileBytes / kUnit;
constexpr int64_t kMaxRunUnits = int64_t{1} << 30;
constexpr int64_t kWindowUnits = int64_t{1} << 32;
static_assert(kMaxRunUnits % kTileUnits == 0);

// ---- on the device ----

struct Copy {
  using Value = uint16_t;
  __device__ explicit Copy(double /*scale*/) {}
  __device__ Value operator()(Value value) const { return value; }
};

/// Ignores what was there; the compiler then drops the reads.
struct Zero {
  using Value = uint16_t;
  __device__ Value operator()(Value /*value*/) const { return 0; }
};

template <typename T>
struct Scale {
  using Value = T;
  T factor;
  __device__ explicit Scale(double scale) : factor(static_cast<T>(scale)) {}
  __device__ T operator()(T value) const { return value * factor; }
};

template <>
struct Scale<__half> {
  using Value = __half;
  float factor;
  __device__ explicit Scale(double scale) : factor(static_cast<float>(scale)) {}
  __device__ __half operator()(__half value) const { return __float2half_rn(__half2float(value) * factor); }
};

template <>
struct Scale<__nv_bfloat16> {
  using Value = __nv_bfloat16;
  float factor;
  __device__ explicit Scale(double scale) : factor(static_cast<float>(scale)) {}
  __device__ __nv_bfloat16 operator()(__nv_bfloat16 value) const {
    return __float2bfloat16_rn(__bfloat162float(value) * factor);
  }
};

/// Applies `op` to every element of one machine word of 2 to 16 bytes.
template <typename Word, typename Op>
__device__ Word transformed(Word word, const Op& op) {
  using Value = typename Op::Value;
  Value values[sizeof(Word) / sizeof(Value)];
  memcpy(values, &word, sizeof(Word));
#pragma unroll
  for (Value& value : values) value = op(value);
  memcpy(&word, values, sizeof(Word));
  return word;
}

/// Moves `bytes` by words, and what does not fill a word at either end by elements. Both sides lie equally modulo the
/// size of a word; they may be the same memory.
template <typename Word, typename Op>
__device__ void move_words(const char* from, char* to, uint32_t bytes, const Op& op) {
  using Value = typename Op::Value;
  constexpr uint32_t kUnroll = sizeof(Word) < 16 ? 8 : 4;
  const auto misplaced = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to) % sizeof(Word));
  const uint32_t head = min(static_cast<uint32_t>((sizeof(Word) - misplaced) % sizeof(Word)), bytes);
  const uint32_t words = (bytes - head) / sizeof(Word);
  const uint32_t tail_start = head + words * sizeof(Word);

  const auto* source = reinterpret_cast<const Word*>(from + head);
  auto* target = reinterpret_cast<Word*>(to + head);
  for (uint32_t first = threadIdx.x; first < words; first += kUnroll * kThreads) {
    Word held[kUnroll];
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < words) held[k] = source[first + k * kThreads];
    }
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < words) target[first + k * kThreads] = transformed(held[k], op);
    }
  }

  if constexpr (sizeof(Word) > sizeof(Value)) {
    const uint32_t in_head = head / sizeof(Value);
    const uint32_t edges = in_head + (bytes - tail_start) / sizeof(Value);
    if (threadIdx.x < edges) {
      const uint32_t at =
          threadIdx.x * static_cast<uint32_t>(sizeof(Value)) + (threadIdx.x < in_head ? 0 : tail_start - head);
      *reinterpret_cast<Value*>(to + at) = op(*reinterpret_cast<const Value*>(from + at));
    }
  }
}

/// Moves `bytes` with the widest words that both sides allow.
template <typename Op>
__device__ void move_bytes(const char* from, char* to, uint32_t bytes, const Op& op) {
  constexpr size_t kElement = sizeof(typename Op::Value);
  const auto skew = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) - reinterpret_cast<uintptr_t>(to));
  if (skew % 16 == 0) {
    move_words<uint4>(from, to, bytes, op);
  } else if (kElement == 8 || skew % 8 == 0) {
    move_words<uint2>(from, to, bytes, op);
  } else if constexpr (kElement <= 4) {
    if (kElement == 4 || skew % 4 == 0) {
      move_words<uint32_t>(from, to, bytes, op);
    } else if constexpr (kElement == 2) {
      move_words<uint16_t>(from, to, bytes, op);
    }
  }
}

/// One block moves tile `blockIdx.x`. Bandwidth-bound: reads and writes every byte once.
template <typename Op, int kCapacity>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ Table<kCapacity> table) {
  const int index = run_of(table, blockIdx.x);
  const Run run = table.runs[index];
  const uint32_t first = (blockIdx.x - table.first_tile[index]) * kTileUnits;
  const uint32_t bytes = min(run.length - first, kTileUnits) * kUnit;
  char* slot = table.bucket + (int64_t{run.offset} + first) * kUnit;
  if (run.grad == nullptr) return move_bytes(slot, slot, bytes, Zero());
  char* grad = run.grad + int64_t{first} * kUnit;
  move_bytes(table.to_bucket ? grad : slot, table.to_bucket ? slot : grad, bytes, Op(table.scale));
}

// ---- on the host ----

enum class Direction { kPack, kUnpack };

int64_t bytes_of(Element element) {
  switch (element) {
    case Element::kDouble:
      return 8;
    case Element::kFloat:
      return 4;
    default:
      return 2;
  }
}

/// Walks over the segments in pieces that fit a Run, and passes over those with nothing to move.
class Pieces {
 public:
  Pieces(char* bucket, std::span<const Segment> segments, int64_t element_bytes, Direction direction, bool scales)
      : bucket_(bucket), segments_(segments), units_(element_bytes / kUnit), direction_(direction), scales_(scales) {
    for (const Segment& segment : segments_) {
      if (!is_idle(segment)) left_ += (segment.numel * units_ + kMaxRunUnits - 1) / kMaxRunUnits;
    }
    skip_idle();
  }

  [[nodiscard]] int64_t left() const { return left_; }
  /// Where the next piece lies in the bucket, in units.
  [[nodiscard]] int64_t offset() const { return segments_[at_].offset * units_ + done_; }

  /// The next piece, with its offset taken from `base`.
  Run take(int64_t base) {
    const Segment& segment = segments_[at_];
    const int64_t all = segment.numel * units_;
    const int64_t length = std::min(all - done_, kMaxRunUnits);
    auto* grad = static_cast<char*>(segment.grad);
    const Run run{grad == nullptr ? nullptr : grad + done_ * kUnit, static_cast<uint32_t>(offset() - base),
                  static_cast<uint32_t>(length)};
    done_ += length;
    --left_;
    if (done_ == all) {
      ++at_;
      done_ = 0;
      skip_idle();
    }
    return run;
  }

 private:
  [[nodiscard]] bool is_idle(const Segment& segment) const {
    if (segment.numel == 0) return true;
    if (segment.grad == nullptr) return direction_ == Direction::kUnpack;
    return !scales_ && segment.grad == bucket_ + segment.offset * units_ * kUnit;
  }
  void skip_idle() {
    while (at_ < segments_.size() && is_idle(segments_[at_])) ++at_;
  }

  char* bucket_;
  std::span<const Segment> segments_;
  int64_t units_;  // per element
  Direction direction_;
  bool scales_;
  size_t at_ = 0;
  int64_t done_ = 0;  // of segments_[at_], in units
  int64_t left_ = 0;
};

/// What every launch of one call has in common.
struct Job {
  char* bucket;
  double scale;
  Direction direction;
  cudaStream_t stream;
};

/// Fills one table, as far as there are pieces and room for them, and launches it.
template <typename Op, int kCapacity>
cudaError_t launch_one(const Job& job, Pieces& pieces) {
  Table<kCapacity> table;
  const int64_t base = pieces.offset() / kWindowUnits * kWindowUnits;
  table.bucket = job.bucket + base * kUnit;
  table.scale = job.scale;
  table.to_bucket = job.direction == Direction::kPack;
  table.num_runs = 0;
  uint32_t tiles = 0;
  while (pieces.left() > 0 && table.num_runs < kCapacity && pieces.offset() / kWindowUnits * kWindowUnits == base) {
    const Run run = pieces.take(base);
    table.first_tile[table.num_runs] = tiles;
    table.runs[table.num_runs++] = run;
    tiles += (run.length + kTileUnits - 1) / kTileUnits;
  }
  void* parameters[] = {&table};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&move_kernel<Op, kCapacity>), dim3(tiles), dim3(kThreads),
                          parameters, 0, job.stream);
}

template <typename Op>
Launched launch_all(const Job& job, Pieces pieces) {
  Launched result;
  while (pieces.left() > 0) {
    const auto launch = pieces.left() <= kSmall    ? &launch_one<Op, kSmall>
                        : pieces.left() <= kMedium ? &launch_one<Op, kMedium>
                        : pieces.left() <= kLarge  ? &launch_one<Op, kLarge>
                                                   : &launch_one<Op, kLargest>;
    result.status = launch(job, pieces);
    if (result.status != cudaSuccess) return result;
    ++result.launches;
  }
  return result;
}

}  // namespace

Launched launch_pack(void* bucket, std::span<const Segment> segments, Element element, double scale,
                     cudaStream_t stream) {
  const bool scales = scale != 1.0;
  const Job job{static_cast<char*>(bucket), scale, Direction::kPack, stream};
  const Pieces pieces(job.bucket, segments, bytes_of(element), job.direction, scales);
  if (!scales) return launch_all<Copy>(job, pieces);
  switch (element) {
    case Element::kFloat:
      return launch_all<Scale<float>>(job, pieces);
    case Element::kDouble:
      return launch_all<Scale<double>>(job, pieces);
    case Element::kHalf:
      return launch_all<Scale<__half>>(job, pieces);
    case Element::kBFloat16:
      return launch_all<Scale<__nv_bfloat16>>(job, pieces);
  }
  return {cudaErrorInvalidValue, 0};
}

Launched launch_unpack(const void* bucket, std::span<const Segment> segments, Element element, cudaStream_t stream) {
  const Job job{static_cast<char*>(const_cast<void*>(bucket)), 1.0, Direction::kUnpack, stream};
  return launch_all<Copy>(job, Pieces(job.bucket, segments, bytes_of(element), job.direction, false));
}

}  // namespace lockstep::cuda
