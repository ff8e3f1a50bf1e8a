// Bandwidth of pack and unpack against a device-to-device copy of the same bytes. Needs a GPU, no torch.
//
//   pack_bench [MEGABYTES...]        default: 25 100
//
// Prints one JSON object. A row is one bucket: `gbps` counts bytes read plus bytes written, `ratio` is the time of the
// copy over the time of the kernel (1: as fast as cudaMemcpyAsync), `host_us` is what the calling thread spends on it.
// Device times are medians over replays of a CUDA graph of 16 calls, on buckets used in turns that are together several
// times as large as the L2 cache; the copy gets the better of a graph and a stream.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/pack.h"

namespace {

using lockstep::Segment;
using lockstep::cuda::Element;

constexpr int kCallsPerGraph = 16;
constexpr int kReplays = 21;
constexpr int64_t kSlotBytes = 128;        // slots are padded to this, as bucket plans do
constexpr int64_t kAllocationBytes = 512;  // and gradients start at multiples of this, as torch's allocator does

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "pack_bench: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/// How the bytes of a bucket are spread over its gradients.
enum class Layout {
  kEqual,    ///< Gradients of equal size, slots padded.
  kSkewed,   ///< One with nearly everything, the others 256 bytes each.
  kCompact,  ///< Odd sizes without padding: hardly any slot lies as its gradient does.
};

const char* name(Layout layout) {
  return layout == Layout::kEqual ? "equal" : layout == Layout::kSkewed ? "skewed" : "compact";
}

struct Case {
  Layout layout;
  int64_t megabytes;
  int gradients;
  Element element;
  int64_t element_bytes;
};

/// One bucket with its gradients, on the device.
struct Bucket {
  char* memory = nullptr;
  char* grads = nullptr;
  int64_t bytes = 0;
  std::vector<Segment> segments;
};

std::vector<int64_t> sizes_of(const Case& c) {
  const int64_t total = c.megabytes * 1'000'000 / c.element_bytes;
  std::vector<int64_t> sizes(static_cast<size_t>(c.gradients), total / c.gradients);
  if (c.layout == Layout::kSkewed) {
    std::fill(sizes.begin(), sizes.end(), 256 / c.element_bytes);
    sizes.front() = total - (c.gradients - 1) * (256 / c.element_bytes);
  } else if (c.layout == Layout::kCompact) {
    for (int64_t& size : sizes) size |= 1;
  }
  return sizes;
}

Bucket make_bucket(const Case& c, const std::vector<char>& noise) {
  Bucket bucket;
  int64_t slots = 0;
  int64_t heap = 0;
  std::vector<int64_t> starts;
  for (const int64_t numel : sizes_of(c)) {
    bucket.segments.push_back({nullptr, slots / c.element_bytes, numel});
    starts.push_back(heap);
    bucket.bytes += numel * c.element_bytes;
    slots += c.layout == Layout::kCompact ? numel * c.element_bytes : rounded_up(numel * c.element_bytes, kSlotBytes);
    heap += rounded_up(numel * c.element_bytes, kAllocationBytes);
  }
  check(cudaMalloc(reinterpret_cast<void**>(&bucket.memory), static_cast<size_t>(slots)), "memory of a bucket");
  check(cudaMalloc(reinterpret_cast<void**>(&bucket.grads), static_cast<size_t>(heap)), "memory of the gradients");
  const auto filled = [&](char* memory, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(noise.size())) {
      const auto count = std::min(static_cast<size_t>(bytes - at), noise.size());
      check(cudaMemcpy(memory + at, noise.data(), count, cudaMemcpyHostToDevice), "random data");
    }
  };
  filled(bucket.memory, slots);
  filled(bucket.grads, heap);
  for (size_t i = 0; i < starts.size(); ++i) bucket.segments[i].grad = bucket.grads + starts[i];
  return bucket;
}

using Call = std::function<void(const Bucket&, cudaStream_t)>;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// Microseconds per call of `enqueue`, which makes kCallsPerGraph of them.
double timed(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaEvent_t before = nullptr;
  cudaEvent_t after = nullptr;
  check(cudaEventCreate(&before), "an event");
  check(cudaEventCreate(&after), "an event");
  std::vector<double> samples;
  for (int replay = -3; replay < kReplays; ++replay) {  // the first three warm up
    check(cudaEventRecord(before, stream), "recording");
    enqueue();
    check(cudaEventRecord(after, stream), "recording");
    check(cudaEventSynchronize(after), "waiting");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, before, after), "reading the time");
    if (replay >= 0) samples.push_back(milliseconds * 1000.0 / kCallsPerGraph);
  }
  check(cudaEventDestroy(before), "an event");
  check(cudaEventDestroy(after), "an event");
  return median(samples);
}

double graph_time(const std::vector<Bucket>& buckets, cudaStream_t stream, const Call& call) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replayed = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
  for (int i = 0; i < kCallsPerGraph; ++i) call(buckets[static_cast<size_t>(i) % buckets.size()], stream);
  check(cudaStreamEndCapture(stream, &graph), "capturing");
  check(cudaGraphInstantiate(&replayed, graph, 0), "making a graph");
  const double result = timed(stream, [&] { check(cudaGraphLaunch(replayed, stream), "a graph"); });
  check(cudaGraphExecDestroy(replayed), "a graph");
  check(cudaGraphDestroy(graph), "a graph");
  return result;
}

double stream_time(const std::vector<Bucket>& buckets, cudaStream_t stream, const Call& call) {
  return timed(stream, [&] {
    for (int i = 0; i < kCallsPerGraph; ++i) call(buckets[static_cast<size_t>(i) % buckets.size()], stream);
  });
}

/// Microseconds that the calling thread spends per call while the device is still busy.
double host_time(const Bucket& bucket, cudaStream_t stream, const Call& call) {
  std::vector<double> samples;
  for (int round = 0; round < 11; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCallsPerGraph; ++i) call(bucket, stream);
    const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
    check(cudaStreamSynchronize(stream), "waiting");
    samples.push_back(spent.count() / kCallsPerGraph);
  }
  return median(samples);
}

void launched(const lockstep::cuda::Launched& result, int expected) {
  check(result.status, "a launch");
  if (result.launches == expected) return;
  std::fprintf(stderr, "pack_bench: %d launches instead of %d\n", result.launches, expected);
  std::exit(1);
}

/// Prints the rows of one case: pack with a factor, pack as it is, unpack.
void measure(const Case& c, const std::vector<char>& noise, cudaStream_t stream, bool& first) {
  std::vector<Bucket> buckets;
  const int64_t count = std::max<int64_t>(3, 400 / c.megabytes / 2);
  for (int64_t i = 0; i < count; ++i) buckets.push_back(make_bucket(c, noise));

  const Call copy = [](const Bucket& b, cudaStream_t s) {
    check(cudaMemcpyAsync(b.memory, b.grads, static_cast<size_t>(b.bytes), cudaMemcpyDeviceToDevice, s), "a copy");
  };
  const double copy_us = std::min(graph_time(buckets, stream, copy), stream_time(buckets, stream, copy));
  const auto pack = [&](double scale) -> Call {
    return [&c, scale](const Bucket& b, cudaStream_t s) {
      launched(lockstep::cuda::launch_pack(b.memory, b.segments, c.element, scale, s), 1);
    };
  };
  const Call unpack = [&c](const Bucket& b, cudaStream_t s) {
    launched(lockstep::cuda::launch_unpack(b.memory, b.segments, c.element, s), 1);
  };
  const std::pair<const char*, Call> calls[] = {{"pack_scaled", pack(0.5)}, {"pack", pack(1.0)}, {"unpack", unpack}};
  for (const auto& [what, call] : calls) {
    const double us = graph_time(buckets, stream, call);
    const double gbps = 2e-3 * static_cast<double>(buckets.front().bytes) / us;
    std::printf(
        "%s\n    {\"op\": \"%s\", \"layout\": \"%s\", \"bucket_mb\": %lld, \"gradients\": %d, \"dtype\": \"%s\", "
        "\"us\": %.2f, \"gbps\": %.0f, \"copy_us\": %.2f, \"ratio\": %.3f, \"stream_us\": %.2f, \"host_us\": %.2f}",
        first ? "" : ",", what, name(c.layout), static_cast<long long>(c.megabytes), c.gradients,
        c.element == Element::kFloat ? "fp32" : "bf16", us, gbps, copy_us, copy_us / us,
        stream_time(buckets, stream, call), host_time(buckets.front(), stream, call));
    first = false;
  }
  for (const Bucket& bucket : buckets) {
    check(cudaFree(bucket.memory), "memory");
    check(cudaFree(bucket.grads), "memory");
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int64_t> megabytes{25, 100};
  if (argc > 1) megabytes.clear();
  for (int i = 1; i < argc; ++i) {
    const long value = std::strtol(argv[i], nullptr, 10);
    if (value < 1 || value > 10000) {
      std::fprintf(stderr, "pack_bench: '%s' is no size in megabytes (1 to 10000)\n", argv[i]);
      return 2;
    }
    megabytes.push_back(value);
  }

  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "looking for a GPU");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  std::vector<char> noise(1 << 22);
  std::mt19937 random(1);
  for (char& byte : noise) byte = static_cast<char>(random());

  std::printf("{\n  \"device\": \"%s\",\n  \"calls_per_graph\": %d,\n  \"replays\": %d,\n  \"rows\": [", device.name,
              kCallsPerGraph, kReplays);
  bool first = true;
  for (const int64_t size : megabytes) {
    for (const auto& [element, bytes] :
         {std::pair{Element::kFloat, int64_t{4}}, std::pair{Element::kBFloat16, int64_t{2}}}) {
      for (const int gradients : {10, 100, 1000})
        measure({Layout::kEqual, size, gradients, element, bytes}, noise, stream, first);
      for (const Layout layout : {Layout::kSkewed, Layout::kCompact}) {
        measure({layout, size, 1000, element, bytes}, noise, stream, first);
      }
    }
  }
  std::printf("\n  ]\n}\n");
  return 0;
}
