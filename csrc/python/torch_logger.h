// A c10d::Logger that describes our reducer, for everything that reads torch's logging data.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <vector>

#include "api/replica.h"

namespace lockstep::python {

/// What torch logs once, when a model is wrapped.
struct ConstructionFacts {
  int64_t bucket_cap_bytes = 0;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
};

/// Torch's functions accept only a real `c10d::Logger`, which in turn wants a real `c10d::Reducer`: the base is given a
/// reducer over one scalar of its own, and every field that speaks of parameters, buckets or steps is replaced by ours.
class TorchLogger final : public c10d::Logger {
 public:
  TorchLogger(std::shared_ptr<Replica> replica, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
              ConstructionFacts facts);
  ~TorchLogger() noexcept(false);

  /// Keeps what the wrapper was built with; from TORCH_DISTRIBUTED_DEBUG=INFO on, prints all of it.
  void describe_construction(const std::string& module_name, const std::vector<int>& device_ids, int output_device,
                             bool broadcast_buffers, bool has_sync_bn, bool static_graph);

  /// Samples the last step, as torch does: in steps 1 to 10, then at multiples of the sample rate. Called before each
  /// synchronised forward. With TORCH_DISTRIBUTED_DEBUG=DETAIL, prints the averages.
  void sample_last_step();
  void set_sample_rate(int64_t rate) { sample_rate_ = rate; }

  /// Torch's two maps, with our values.
  [[nodiscard]] at::DDPLoggingData data();

 private:
  void sample_times();
  void sample_buckets();
  void print_averages();

  std::shared_ptr<Replica> replica_;
  ConstructionFacts facts_;
  int64_t sample_rate_ = 100;
  int64_t samples_ = 0;
  std::map<std::string, std::string> strings_;  // sampled fields
  std::map<std::string, int64_t> numbers_;
};

}  // namespace lockstep::python
