// The engine with the method names of torch's dist.Reducer, so that whatever drives torch's class can drive ours.
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "api/replica.h"
#include "comm/watched_communicator.h"
#include "python/bindings.h"
#include "python/held.h"

namespace lockstep::python {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::shared_ptr<Replica> make_replica(std::vector<at::Tensor> params, std::vector<std::string> names,
                                      std::vector<bool> sparse, const Group& group, GraphKind graph,
                                      bool gradient_as_bucket_view, BucketLimits first_limits, BucketLimits limits,
                                      bool lazy_buckets, bool skip_unused_buckets, bool strict, bool uneven_forwards,
                                      bool guards, int64_t stall_threshold_ms, const std::string& communicator,
                                      const NcclOptions& nccl) {
  ReducerOptions options{.graph = graph,
                         .placement = gradient_as_bucket_view ? GradPlacement::kBucketView : GradPlacement::kOwnMemory,
                         .lifetime = lazy_buckets ? BucketLifetime::kStep : BucketLifetime::kTraining,
                         .skip_unused_buckets = skip_unused_buckets,
                         .strict = strict,
                         .uneven_forwards = uneven_forwards,
                         .guards = guards,
                         .first_limits = std::move(first_limits),
                         .limits = std::move(limits)};
  auto progress = std::make_shared<Progress>();
  const at::Device device = params.empty() ? at::Device(at::kCPU) : params.front().device();
  auto comm = make_watched_communicator(group, progress, device,
                                        {.threshold = std::chrono::milliseconds(stall_threshold_ms),
                                         .kind = communicator_kind(communicator),
                                         .nccl = nccl});
  return std::make_shared<Replica>(ParamList{std::move(params), std::move(names), std::move(sparse)}, std::move(comm),
                                   std::move(options), std::move(progress));
}

/// @throws std::out_of_range  Python sees an IndexError.
ParamId known(Replica& replica, size_t i) {
  const size_t count = replica.reducer().params().size();
  if (i >= count) throw std::out_of_range(fmt::format("there is no parameter {}, only {} parameters", i, count));
  return param_id(i);
}

/// Answers with the sum that `work` leaves in its one-element result.
std::function<int()> live_ranks(c10::intrusive_ptr<c10d::Work> work) {
  return [work = std::move(work), known = std::optional<int>()]() mutable {
    if (!known) {
      work->wait();
      known = work->result().front().item<int>();
    }
    return *known;
  };
}

}  // namespace

void bind_reducer(py::module_& m) {
  // The GIL goes first: whoever waits for the reducer's mutex must not hold the GIL,
  // because a Python hook takes it while that mutex is held.
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<NcclOptions>(m, "NcclOptions", "Settings of an NCCL communicator of our own.")
      .def(py::init([](int max_ctas, std::string net_name, bool split_share, std::optional<int64_t> in_place_bytes) {
             return NcclOptions{.max_ctas = max_ctas,
                                .net_name = std::move(net_name),
                                .split_share = split_share,
                                .in_place_bytes = in_place_bytes};
           }),
           py::kw_only(), py::arg("max_ctas"), py::arg("net_name"), py::arg("split_share"), py::arg("in_place_bytes"));

  py::enum_<GraphKind>(m, "GraphKind", "What may be assumed about the parameters that a backward reaches.")
      .value("COMPLETE", GraphKind::kComplete)
      .value("DYNAMIC", GraphKind::kDynamic)
      .value("STATIC", GraphKind::kStatic);

  py::class_<StepTimes>(m, "StepTimes", "Time stamps of one step in nanoseconds; 0 means that it did not happen.")
      .def_readonly("forward_start", &StepTimes::forward_start)
      .def_readonly("backward_compute_start", &StepTimes::backward_compute_start)
      .def_readonly("backward_compute_end", &StepTimes::backward_compute_end)
      .def_readonly("communication_start", &StepTimes::communication_start)
      .def_readonly("communication_end", &StepTimes::communication_end);

  py::class_<Replica, std::shared_ptr<Replica>> reducer(m, "Reducer", kDestroyedWithoutGil);
  reducer
      .def(py::init(&make_replica), py::arg("params"), py::arg("names"), py::arg("expect_sparse_gradients"),
           py::arg("process_group"), py::arg("graph"), py::arg("gradient_as_bucket_view"), py::arg("first_limits"),
           py::arg("limits"), py::arg("lazy_buckets"), py::arg("skip_unused_buckets"), py::arg("strict"),
           py::arg("uneven_forwards"), py::arg("guards"), py::arg("stall_threshold_ms"), py::arg("communicator"),
           py::arg("nccl"), NoGil(), "Limits are in bytes. Not collective. No monitor with a threshold of 0.")
      .def("verify_same_model", &Replica::verify_same_model, NoGil(),
           "Raises RuntimeError on every rank when the ranks wrap different models. Collective.")
      .def("isolate", &Replica::isolate, NoGil(),
           "Moves to connections that only this replica uses, where there are any. Collective.")
      .def("copy_from", &Replica::copy_from, py::arg("tensors"), py::arg("chunk_bytes"), py::arg("root"), NoGil(),
           "Overwrites the tensors by those of rank `root`. Collective.")
      .def("prepare_for_forward", &Replica::count_forward, NoGil(), "Counts a forward that is to be reduced.")
      .def(
          "_rebuild_buckets", [](Replica& self) { return self.reducer().begin_step(); }, NoGil(),
          "Begins a step; returns True when a new bucket plan was adopted.")
      .def(
          "prepare_for_backward",
          [](Replica& self, const std::vector<at::Tensor>& outputs) { self.reducer().expect_backward(outputs); },
          py::arg("outputs"), NoGil(), "Announces a backward that is to be reduced.")
      .def(
          "prepare_for_backward",
          [](Replica& self, const at::Tensor& output) {
            self.reducer().expect_backward({&output, 1});
          },
          py::arg("output"), NoGil())
      .def(
          "_set_static_graph", [](Replica& self) { self.reducer().set_static_graph(); }, NoGil())
      .def(
          "_ddp_graph_static", [](Replica& self) { return self.reducer().graph_has_been_static(); }, NoGil(),
          "False once this rank has used other parameters in one reduced step than in the one before.")
      .def(
          "_set_manual_finalization_required",
          [](Replica& self, bool required) { self.reducer().set_manual_finalization(required); }, py::arg("required"),
          NoGil())
      .def(
          "_should_finalize_after_backward",
          [](Replica& self) { return self.reducer().should_finalize_after_backward(); }, NoGil())
      .def(
          "_finalize_backward_manual", [](Replica& self) { self.reducer().finalize_by_hand(); }, NoGil())
      .def(
          "_check_reducer_finalized", [](Replica& self) { self.reducer().check_finished(); }, NoGil())
      .def(
          "finish_failed_pass", [](Replica& self) { self.reducer().finish_failed_pass(); }, NoGil(),
          "Ends a backward that failed on this rank, as the next forward would.")
      .def(
          "_remove_autograd_hooks", [](Replica& self) { self.reducer().detach(); }, NoGil())
      .def(
          "_get_local_used_map", [](Replica& self) { return self.reducer().used_map(); }, NoGil())
      .def(
          "shadow_step", [](Replica& self) { self.reducer().shadow_step(); }, NoGil(),
          "Takes part in the reductions of one step with zeros. Collective.")
      .def(
          "_set_forward_pass_work_handle",
          [](Replica& self, c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial_world_size) {
            self.reducer().set_live_ranks(divide_by_initial_world_size ? nullptr : live_ranks(std::move(work)));
          },
          py::arg("work"), py::arg("use_static_world_size"), NoGil(),
          "`work` counts the ranks that still have data; gradients are divided by it, or by all ranks.")
      .def(
          "_autograd_hook", [](Replica& self, size_t i) { self.reducer().on_grad_ready(known(self, i)); },
          py::arg("index"), NoGil(), "The gradient of this parameter is there, as if autograd had said so.")
      .def(
          "_set_optimizer_in_backward", [](Replica& self) { self.reducer().leave_gradients_to_hook(); }, NoGil())
      .def(
          "add_final_wait",
          [](Replica& self, py::function wait) {
            auto function = held(std::move(wait));
            const py::gil_scoped_release no_gil;
            self.reducer().add_final_wait([function] {
              const py::gil_scoped_acquire gil;
              (*function)();
            });
          },
          py::arg("wait"), "Calls `wait` at the end of the backward that is reduced next.")
      .def(
          "reset",
          [](Replica& self, const Group& group, int64_t stall_threshold_ms) {
            self.reset(make_watched_communicator(group, self.progress(),
                                                 self.reducer().params().tensors.front().device(),
                                                 {.threshold = std::chrono::milliseconds(stall_threshold_ms)}));
          },
          py::arg("process_group"), py::arg("stall_threshold_ms"), NoGil(), "Moves to another group.")
      .def(
          "bucket_params", [](Replica& self) { return self.reducer().bucket_params(); }, NoGil(),
          "Parameter indices of each bucket, in the order of sending.")
      .def(
          "bucket_payload_bytes", [](Replica& self) { return self.reducer().bucket_payload_bytes(); }, NoGil(),
          "Bytes of gradients in each bucket, in the order of sending.")
      .def(
          "arrival_order", [](Replica& self) { return self.reducer().arrival_order(); }, NoGil(),
          "Parameter indices in the order in which the last reduced backward completed them.")
      .def(
          "has_final_plan", [](Replica& self) { return self.reducer().has_final_plan(); }, NoGil())
      .def(
          "num_reductions", [](Replica& self) { return self.reducer().num_reductions(); }, NoGil(),
          "Backward passes reduced so far.")
      .def(
          "last_step_times", [](Replica& self) { return self.reducer().last_step_times(); }, NoGil());
  bind_watch(m, reducer);
  bind_times(m, reducer);
  bind_hooks(m, reducer);
}

}  // namespace lockstep::python
