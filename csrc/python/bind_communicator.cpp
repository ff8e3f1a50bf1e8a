// The collectives of the engine for Python: for tests, and for hooks that want what c10d does not offer.
#include "comm/c10d_communicator.h"
#include "python/bindings.h"

namespace lockstep::python {

void bind_communicator(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  py::class_<C10dCommunicator, std::shared_ptr<C10dCommunicator>>(
      m, "Communicator", kDestroyedWithoutGil, "A process group as the engine sees it. Every call waits for its end.")
      .def(py::init<Group>(), py::arg("process_group"))
      .def("rank", &C10dCommunicator::rank)
      .def("size", &C10dCommunicator::size)
      .def(
          "sum", [](C10dCommunicator& self, at::Tensor data) { self.sum(std::move(data))->wait(); }, py::arg("data"),
          NoGil(), "In place.")
      .def(
          "max", [](C10dCommunicator& self, at::Tensor data) { self.max(std::move(data))->wait(); }, py::arg("data"),
          NoGil(), "In place.")
      .def(
          "average", [](C10dCommunicator& self, at::Tensor data) { self.average(std::move(data))->wait(); },
          py::arg("data"), NoGil(), "In place.")
      .def(
          "broadcast",
          [](C10dCommunicator& self, at::Tensor data, int root) { self.broadcast(std::move(data), root)->wait(); },
          py::arg("data"), py::arg("root"), NoGil(), "In place.")
      .def(
          "all_gather",
          [](C10dCommunicator& self, at::Tensor output, at::Tensor input) {
            self.all_gather(std::move(output), std::move(input))->wait();
          },
          py::arg("output"), py::arg("input"), NoGil(), "`output` has size() times as many elements.")
      .def(
          "all_to_all",
          [](C10dCommunicator& self, at::Tensor output, at::Tensor input) {
            self.all_to_all(std::move(output), std::move(input))->wait();
          },
          py::arg("output"), py::arg("input"), NoGil(), "Chunk r of `input` goes to rank r.")
      .def(
          "reduce_scatter",
          [](C10dCommunicator& self, at::Tensor output, at::Tensor input) {
            self.reduce_scatter(std::move(output), std::move(input))->wait();
          },
          py::arg("output"), py::arg("input"), NoGil(), "`input` has size() times as many elements.");
}

}  // namespace lockstep::python
