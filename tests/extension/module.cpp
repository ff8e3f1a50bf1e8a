// lockstep_testing: what tests and benchmarks need from C++ and no user ever does.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/extension.h>

#include <memory>

#include "allocation_meter.h"
#include "instant_group.h"
#include "operator_counter.h"

namespace {

namespace testing = lockstep::testing;

/// Makes `torch.distributed.init_process_group("instant", store=..., rank=..., world_size=...)` work.
void register_backend() {
  py::module_::import("torch.distributed")
      .attr("Backend")
      .attr("register_backend")(
          "instant",
          py::cpp_function([](const py::object& /*store*/, int rank, int size, const py::object& /*timeout*/) {
            return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<testing::InstantBackend>(rank, size));
          }),
          py::arg("devices") = std::vector<std::string>{"cpu"});
}

void bind_instant_group(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<testing::OpCount>(m, "OpCount", "What one operation was asked to do since the last reset.")
      .def_readonly("calls", &testing::OpCount::calls)
      .def_readonly("bytes", &testing::OpCount::bytes, "Contributed by this rank.");
  m.def("instant_group", &testing::make_instant_group, py::arg("rank"), py::arg("world_size"), NoGil(),
        "A process group for CPU tensors whose collectives complete at once, unknown to torch.distributed. "
        "For a registered one: init_process_group('instant', store=HashStore(), rank=..., world_size=...).");
  m.def(
      "counts", [](c10d::ProcessGroup& group) { return testing::instant_backend(group)->counts(); }, py::arg("group"),
      NoGil(), "dict from operation name to OpCount, for an instant group.");
  m.def(
      "reset_counts", [](c10d::ProcessGroup& group) { testing::instant_backend(group)->reset_counts(); },
      py::arg("group"), NoGil(), "Forgets all calls of an instant group.");
}

void bind_allocation_meter(py::module_& m) {
  using testing::AllocationMeter;
  py::class_<AllocationMeter, std::shared_ptr<AllocationMeter>>(
      m, "AllocationMeter",
      "Context manager that counts bytes of CPU tensors, allocated minus freed. Not inside a torch profiler.")
      .def(py::init<>())
      .def("__enter__",
           [](const std::shared_ptr<AllocationMeter>& self) {
             c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, self);
             return self;
           })
      .def("__exit__",
           [](AllocationMeter& /*self*/, const py::args& /*error*/) {
             c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
           })
      .def_property_readonly("live_bytes", &AllocationMeter::live_bytes)
      .def_property_readonly("peak_bytes", &AllocationMeter::peak_bytes);
}

void bind_operator_counter(py::module_& m) {
  using testing::OperatorCounter;
  py::class_<OperatorCounter>(
      m, "OperatorCounter",
      "Context manager that counts operators dispatched by all threads, nested calls included. One at a time.")
      .def(py::init<>())
      .def(
          "__enter__",
          [](OperatorCounter& self) -> OperatorCounter& {
            self.start();
            return self;
          },
          py::return_value_policy::reference_internal)
      .def("__exit__", [](OperatorCounter& self, const py::args& /*error*/) { self.stop(); })
      .def_property_readonly("count", &OperatorCounter::count);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_backend();
  bind_instant_group(m);
  bind_allocation_meter(m);
  bind_operator_counter(m);
}
