// The kernel that moves gradients between their own dtype and a bucket of another one.
#include <algorithm>

#include "kernels/cuda/cast.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/table.cuh"

namespace lockstep::cuda {
namespace {

// Offsets and lengths of runs count elements here.
constexpr uint32_t kTile = 4096;
constexpr int64_t kMaxRun = int64_t{1} << 30;
constexpr int64_t kWindow = int64_t{1} << 32;
constexpr uint32_t kWide = 4;  // elements that a thread moves at once where both sides are aligned

// ---- on the device ----

/// The product is formed in the gradients' precision, at least fp32.
template <typename From, typename To>
__device__ To cast(From value, double scale) {
  if constexpr (sizeof(From) == sizeof(double)) {
    return from_float<To>(as_float(value * scale));
  } else {
    return from_float<To>(as_float(value) * static_cast<float>(scale));
  }
}

template <typename T>
struct alignas(sizeof(T) * kWide > 16 ? 16 : sizeof(T) * kWide) Pack {
  T values[kWide];
};

template <typename T>
__device__ bool aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<T>) == 0;
}

/// Moves `count` elements. Bandwidth-bound: reads and writes every element once.
template <typename From, typename To>
__device__ void cast_elements(const From* from, To* to, uint32_t count, double scale) {
  const uint32_t wide = aligned(from) && aligned(to) ? count / kWide : 0;
  const auto* source = reinterpret_cast<const Pack<From>*>(from);
  auto* target = reinterpret_cast<Pack<To>*>(to);
  for (uint32_t i = threadIdx.x; i < wide; i += kThreads) {
    const Pack<From> in = source[i];
    Pack<To> out;
#pragma unroll
    for (uint32_t k = 0; k < kWide; ++k) out.values[k] = cast<From, To>(in.values[k], scale);
    target[i] = out;
  }
  for (uint32_t i = wide * kWide + threadIdx.x; i < count; i += kThreads) to[i] = cast<From, To>(from[i], scale);
}

/// One block moves tile `blockIdx.x`.
template <typename Grad, typename Wire, int kCapacity>
__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ Table<kCapacity> table) {
  const int index = run_of(table, blockIdx.x);
  const Run run = table.runs[index];
  const uint32_t first = (blockIdx.x - table.first_tile[index]) * kTile;
  const uint32_t count = min(run.length - first, kTile);
  Wire* slot = reinterpret_cast<Wire*>(table.bucket) + int64_t{run.offset} + first;
  if (run.grad == nullptr) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) slot[i] = from_float<Wire>(0.0F);
    return;
  }
  Grad* grad = reinterpret_cast<Grad*>(run.grad) + first;
  if (table.to_bucket) {
    cast_elements(grad, slot, count, table.scale);
  } else {
    cast_elements(slot, grad, count, 1.0);
  }
}

// ---- on the host ----

/// What every launch of one call has in common.
struct Job {
  char* bucket;
  double scale;
  bool to_bucket;
  cudaStream_t stream;
};

/// Walks over the segments in pieces that fit a Run.
struct Cursor {
  std::span<const Segment> segments;
  bool skips_absent;
  size_t at = 0;
  int64_t done = 0;

  void skip_idle() {
    while (at < segments.size() && (segments[at].numel == done || (skips_absent && segments[at].grad == nullptr))) {
      ++at;
      done = 0;
    }
  }
  [[nodiscard]] bool finished() {
    skip_idle();
    return at == segments.size();
  }
  [[nodiscard]] int64_t offset() const { return segments[at].offset + done; }
};

/// Fills one table, as far as there are segments and room for them, and launches it.
template <typename Grad, typename Wire, int kCapacity>
cudaError_t launch_one(const Job& job, Cursor& cursor) {
  Table<kCapacity> table;
  const int64_t base = cursor.offset() / kWindow * kWindow;
  table.bucket = job.bucket + base * static_cast<int64_t>(sizeof(Wire));
  table.scale = job.scale;
  table.to_bucket = job.to_bucket;
  table.num_runs = 0;
  uint32_t tiles = 0;
  while (!cursor.finished() && table.num_runs < kCapacity && cursor.offset() / kWindow * kWindow == base) {
    const Segment& segment = cursor.segments[cursor.at];
    const int64_t length = std::min(segment.numel - cursor.done, kMaxRun);
    auto* grad = static_cast<Grad*>(segment.grad);
    table.first_tile[table.num_runs] = tiles;
    table.runs[table.num_runs++] = {reinterpret_cast<char*>(grad == nullptr ? nullptr : grad + cursor.done),
                                    static_cast<uint32_t>(cursor.offset() - base), static_cast<uint32_t>(length)};
    tiles += static_cast<uint32_t>((length + kTile - 1) / kTile);
    cursor.done += length;
  }
  void* parameters[] = {&table};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&cast_kernel<Grad, Wire, kCapacity>), dim3(tiles),
                          dim3(kThreads), parameters, 0, job.stream);
}

template <typename Grad, typename Wire>
Launched launch_all(const Job& job, std::span<const Segment> segments) {
  Launched result;
  Cursor cursor{segments, !job.to_bucket};
  const auto launch = segments.size() <= kMedium ? &launch_one<Grad, Wire, kMedium> : &launch_one<Grad, Wire, kLargest>;
  while (!cursor.finished()) {
    result.status = launch(job, cursor);
    if (result.status != cudaSuccess) return result;
    ++result.launches;
  }
  return result;
}

template <typename Wire>
Launched launch_to(const Job& job, std::span<const Segment> segments, Element grads) {
  switch (grads) {
    case Element::kFloat:
      return launch_all<float, Wire>(job, segments);
    case Element::kDouble:
      return launch_all<double, Wire>(job, segments);
    case Element::kHalf:
      return launch_all<__half, Wire>(job, segments);
    case Element::kBFloat16:
      return launch_all<__nv_bfloat16, Wire>(job, segments);
  }
  return {cudaErrorInvalidValue, 0};
}

Launched launch(const Job& job, std::span<const Segment> segments, Element wire, Element grads) {
  switch (wire) {
    case Element::kHalf:
      return launch_to<__half>(job, segments, grads);
    case Element::kBFloat16:
      return launch_to<__nv_bfloat16>(job, segments, grads);
    case Element::kFloat:
      return launch_to<float>(job, segments, grads);
    case Element::kDouble:
      return launch_to<double>(job, segments, grads);
  }
  return {cudaErrorInvalidValue, 0};
}

}  // namespace

Launched launch_pack_cast(void* bucket, std::span<const Segment> segments, Element wire, Element grads, double scale,
                          cudaStream_t stream) {
  return launch({static_cast<char*>(bucket), scale, true, stream}, segments, wire, grads);
}

Launched launch_unpack_cast(const void* bucket, std::span<const Segment> segments, Element wire, Element grads,
                            cudaStream_t stream) {
  return launch({static_cast<char*>(const_cast<void*>(bucket)), 1.0, false, stream}, segments, wire, grads);
}

}  // namespace lockstep::cuda
