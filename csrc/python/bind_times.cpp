// What the engine recorded of its passes, and how much they count.
#include <pybind11/functional.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "api/replica.h"
#include "python/bindings.h"
#include "reducer/backward_moments.h"

namespace lockstep::python {

void bind_times(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::enum_<RecordLevel>(m, "RecordLevel", "How much is recorded of each pass.")
      .value("OFF", RecordLevel::kOff)
      .value("STEP", RecordLevel::kStep)
      .value("BUCKETS", RecordLevel::kBuckets);

  py::class_<Moment>(m, "Moment", "A moment on the host and on its device, to be read later.")
      .def(py::init([](int64_t host) { return Moment{.host = host, .event = nullptr}; }), py::arg("host"))
      .def_static("here", &Moment::here, py::arg("device"), "On a GPU, of its current stream. Waits for nothing.")
      .def_readonly("host", &Moment::host, "Nanoseconds of the steady clock.")
      .def("has_passed", &Moment::has_passed, "The device has been there, as far as there is one.")
      .def("seconds_to", &Moment::seconds_to, py::arg("later"), "As the device sees it. Both must have passed.");

  py::class_<BackwardMoments::Pass>(m, "BackwardPass", "The turns of one backward.")
      .def_readonly("begin", &BackwardMoments::Pass::begin, "The first gradient.")
      .def_readonly("gradients", &BackwardMoments::Pass::gradients, "All of this rank are there, and packed.")
      .def_readonly("means", &BackwardMoments::Pass::means, "Those of all ranks are there.");

  py::class_<BackwardMoments, std::shared_ptr<BackwardMoments>>(
      m, "BackwardMoments", "Marks the turns of backward passes through the outputs it was shown.",
      kDestroyedWithoutGil)
      .def(py::init<std::function<Moment()>>(), py::arg("now"))
      .def(py::init([](at::Device device) {
             return std::make_shared<BackwardMoments>([device] { return Moment::here(device); });
           }),
           py::arg("device"), "Marks them on the device's current stream.")
      .def(
          "watch", [](BackwardMoments& self, const std::vector<at::Tensor>& outputs) { self.watch(outputs); },
          py::arg("outputs"))
      .def("take", &BackwardMoments::take, NoGil(), "Passes that have ended since the last call.");

  py::class_<CollectiveTimes>(m, "CollectiveTimes", "One collective; nanoseconds of the steady clock, 0 for unknown.")
      .def_readonly("kind", &CollectiveTimes::kind)
      .def_readonly("bytes", &CollectiveTimes::bytes)
      .def_readonly("issued", &CollectiveTimes::issued)
      .def_readonly("ended", &CollectiveTimes::ended)
      .def_readonly("exact", &CollectiveTimes::exact, "False: `ended` is when this rank had waited for it.");

  py::class_<BucketTimes>(m, "BucketTimes", "One bucket of one pass.")
      .def_readonly("bucket", &BucketTimes::bucket)
      .def_readonly("bytes", &BucketTimes::bytes)
      .def_readonly("ready", &BucketTimes::ready)
      .def_readonly("started", &BucketTimes::started)
      .def_readonly("sent", &BucketTimes::sent)
      .def_readonly("wait_start", &BucketTimes::wait_start)
      .def_readonly("wait_end", &BucketTimes::wait_end)
      .def_readonly("collectives", &BucketTimes::collectives);

  py::class_<PassTimes>(m, "PassTimes", "One reduced pass.")
      .def_readonly("number", &PassTimes::pass)
      .def_readonly("forward_start", &PassTimes::forward_start)
      .def_readonly("backward_start", &PassTimes::backward_start)
      .def_readonly("backward_end", &PassTimes::backward_end)
      .def_readonly("end", &PassTimes::end)
      .def_readonly("buckets", &PassTimes::buckets);

  reducer
      .def(
          "record", [](Replica& self, RecordLevel level) { self.reducer().record(level); }, py::arg("level"), NoGil(),
          "From now on keeps the times of each pass. Waits once for a device.")
      .def(
          "take_recorded", [](Replica& self) { return self.reducer().take_recorded(); }, NoGil(),
          "Passes that have ended since the last call, the newest 64 at most. Waits for nothing.")
      .def(
          "sum", [](Replica& self, at::Tensor data) { self.communicator().sum(std::move(data))->wait(); },
          py::arg("data"), NoGil(), "Over what carries the gradients, in place; a device's stream waits. Collective.")
      .def(
          "communicator_name", [](Replica& self) { return self.communicator().name(); }, NoGil())
      .def(
          "set_step_weight",
          [](Replica& self, std::optional<double> weight) { self.reducer().set_step_weight(weight); },
          py::arg("weight"), NoGil(), "How much the gradients of the coming micro-batches count; None: plain means.");
}

}  // namespace lockstep::python
