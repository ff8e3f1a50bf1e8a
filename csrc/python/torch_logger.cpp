#include "python/torch_logger.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <set>

#include "python/bindings.h"

namespace lockstep::python {
namespace {

/// In steps; the first ones are always sampled.
constexpr int64_t kAlwaysSampled = 10;

/// The base class prints what it knows: its own scalar. In this scope it prints nothing.
class QuietBase {
 public:
  QuietBase() : level_(c10d::debug_level()) { c10d::setDebugLevel(c10d::DebugLevel::Off); }
  ~QuietBase() { c10d::setDebugLevel(level_); }
  QuietBase(const QuietBase&) = delete;
  QuietBase& operator=(const QuietBase&) = delete;

 private:
  c10d::DebugLevel level_;
};

std::shared_ptr<c10d::Reducer> scalar_reducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const QuietBase quiet;
  const at::Tensor scalar = at::zeros({1}).set_requires_grad(true);
  return std::make_shared<c10d::Reducer>(std::vector<at::Tensor>{scalar}, std::vector<std::vector<size_t>>{{0}}, group,
                                         std::vector<bool>{false}, c10d::kDefaultBucketBytesCap, false, false,
                                         std::unordered_map<size_t, std::string>{}, c10d::kDefaultFirstBucketBytes,
                                         false, false, std::vector<int64_t>{});
}

template <typename Values>
std::string joined(const Values& values, std::string_view separator = ", ") {
  return fmt::format("{}", fmt::join(values, separator));
}

}  // namespace

TorchLogger::TorchLogger(std::shared_ptr<Replica> replica, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         ConstructionFacts facts)
    : c10d::Logger(scalar_reducer(group)), replica_(std::move(replica)), facts_(std::move(facts)) {
  const ParamList& params = replica_->reducer().params();
  std::set<std::string> dtypes;
  int64_t bytes = 0;
  for (const at::Tensor& param : params.tensors) {
    dtypes.emplace(param.dtype().name());
    bytes += static_cast<int64_t>(param.nbytes());
  }
  strings_["dtypes"] = joined(dtypes);
  strings_["bucket_sizes"] = joined(replica_->reducer().bucket_payload_bytes());
  numbers_["num_parameter_tensors"] = static_cast<int64_t>(params.size());
  numbers_["total_parameter_size_bytes"] = bytes;
  numbers_["bucket_cap_bytes"] = facts_.bucket_cap_bytes;
  numbers_["find_unused_parameters"] = facts_.find_unused_parameters;
  numbers_["gradient_as_bucket_view"] = facts_.gradient_as_bucket_view;
  numbers_["iteration"] = 0;
  replica_->reducer().set_error_observer([this](const std::string& text) { set_error_and_log(text); });
}

TorchLogger::~TorchLogger() noexcept(false) { replica_->reducer().set_error_observer(nullptr); }

void TorchLogger::describe_construction(const std::string& module_name, const std::vector<int>& device_ids,
                                        int output_device, bool broadcast_buffers, bool has_sync_bn,
                                        bool static_graph) {
  {
    const QuietBase quiet;
    set_construction_data_and_log(module_name, device_ids, output_device, broadcast_buffers, has_sync_bn, static_graph);
  }
  if (c10d::debug_level() == c10d::DebugLevel::Off) return;
  const at::DDPLoggingData facts = data();
  std::set<std::string> lines;
  for (const auto& [name, value] : facts.ints_map) lines.insert(fmt::format("{}: {}", name, value));
  for (const auto& [name, value] : facts.strs_map) lines.insert(fmt::format("{}: {}", name, value));
  LOG(INFO) << fmt::format("[Rank {}]: DDP Initialized with: \n{}", replica_->communicator().rank(),
                           joined(lines, "\n"));
}

void TorchLogger::print_averages() {
  if (c10d::debug_level() != c10d::DebugLevel::Detail) return;
  LOG(INFO) << fmt::format(
      "[Rank {} / {}] [before iteration {}] unused_parameter_size={}\n Avg forward compute time: {}\n Avg backward "
      "compute time: {}\n Avg backward comm. time: {}\n Avg backward comm/comp overlap time: {}",
      replica_->communicator().rank(), replica_->communicator().size(), numbers_["iteration"],
      numbers_["unused_parameter_size"], numbers_["avg_forward_compute_time"], numbers_["avg_backward_compute_time"],
      numbers_["avg_backward_comm_time"], numbers_["avg_backward_compute_comm_overlap_time"]);
}

void TorchLogger::sample_last_step() {
  const int64_t forwards = replica_->forwards();
  const bool sampled = forwards > 0 && (forwards <= kAlwaysSampled || forwards % sample_rate_ == 0);
  if (!sampled || replica_->reducer().num_reductions() == 0) return;
  ++samples_;
  numbers_["iteration"] = forwards;
  sample_buckets();
  sample_times();
  print_averages();
}

void TorchLogger::sample_buckets() {
  Reducer& reducer = replica_->reducer();
  numbers_["num_buckets_reduced"] = static_cast<int64_t>(reducer.num_sent_buckets());
  numbers_["unused_parameter_size"] = reducer.unused_bytes();
  strings_["prev_iteration_grad_ready_order_indices"] = joined(reducer.arrival_order());
  const bool rebuilt = reducer.has_final_plan();
  if (numbers_.emplace("has_rebuilt_buckets", 0).first->second == static_cast<int64_t>(rebuilt)) return;
  numbers_["has_rebuilt_buckets"] = rebuilt;
  std::vector<std::string> buckets;
  for (const auto& members : reducer.bucket_params()) buckets.push_back(joined(members, " "));
  strings_["rebuilt_bucket_sizes"] = joined(reducer.bucket_payload_bytes());
  strings_["rebuilt_per_bucket_param_indices"] = joined(buckets);
}

void TorchLogger::sample_times() {
  const StepTimes times = replica_->reducer().last_step_times();
  const auto span = [this](const std::string& name, int64_t begin, int64_t end) {
    if (begin == 0 || end < begin) return;
    numbers_[name] = end - begin;
    int64_t& average = numbers_["avg_" + name];
    average = (average * (samples_ - 1) + (end - begin)) / samples_;
  };
  span("forward_compute_time", times.forward_start, times.backward_compute_start);
  span("backward_compute_time", times.backward_compute_start, times.backward_compute_end);
  span("backward_comm_time", times.communication_start, times.communication_end);
  span("backward_compute_comm_overlap_time", times.communication_start, times.backward_compute_end);
  numbers_["forward_compute_time_start"] = times.forward_start;
  numbers_["backward_compute_time_start"] = times.backward_compute_start;
  numbers_["backward_compute_time_end"] = times.backward_compute_end;
  numbers_["backward_comm_time_start"] = times.communication_start;
  numbers_["backward_comm_time_end"] = times.communication_end;
}

at::DDPLoggingData TorchLogger::data() {
  at::DDPLoggingData data = get_ddp_logging_data();
  const bool failed = data.ints_map.contains("has_error");
  for (const auto& [name, value] : strings_) data.strs_map[name] = value;
  for (const auto& [name, value] : numbers_) data.ints_map[name] = value;
  if (const auto can_set = replica_->reducer().can_set_static_graph()) data.ints_map["can_set_static_graph"] = *can_set;
  if (failed) data.ints_map["iteration"] = replica_->forwards();
  return data;
}

void bind_logger(py::module_& m) {
  py::class_<TorchLogger, std::shared_ptr<TorchLogger>, c10d::Logger>(m, "Logger", kDestroyedWithoutGil)
      .def(py::init([](std::shared_ptr<Replica> replica, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       int64_t bucket_cap_bytes, bool find_unused_parameters, bool gradient_as_bucket_view) {
             return std::make_shared<TorchLogger>(
                 std::move(replica), group,
                 ConstructionFacts{bucket_cap_bytes, find_unused_parameters, gradient_as_bucket_view});
           }),
           py::arg("reducer"), py::arg("process_group"), py::arg("bucket_cap_bytes"), py::arg("find_unused_parameters"),
           py::arg("gradient_as_bucket_view"), py::call_guard<py::gil_scoped_release>())
      .def("set_construction_data_and_log", &TorchLogger::describe_construction,
           py::call_guard<py::gil_scoped_release>(), "What the wrapper was built with.")
      .def("set_runtime_stats_and_log", &TorchLogger::sample_last_step, py::call_guard<py::gil_scoped_release>(),
           "Samples the last step where torch would.")
      .def("set_sample_rate", &TorchLogger::set_sample_rate, py::arg("rate"), "In steps.")
      .def("_get_ddp_logging_data", &TorchLogger::data, py::call_guard<py::gil_scoped_release>());
}

}  // namespace lockstep::python
