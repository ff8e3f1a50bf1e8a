// What the engine tells and is asked about the health of a run: warnings, checks over ranks, where everybody stands.
#include <csignal>
#include <optional>

#include "api/replica.h"
#include "comm/checksum.h"
#include "comm/monitor.h"
#include "python/bindings.h"
#include "python/held.h"

namespace lockstep::python {
namespace {

py::object as_dict(int rank, const std::optional<Standing>& standing) {
  if (!standing) return py::none();
  static constexpr const char* kStages[] = {
      "construction",       "between steps",      "forward", "before backward", "backward",
      "waiting for bucket", "waiting in forward", "gave up", "failed",          "left"};
  py::dict dict;
  dict["stage"] = kStages[static_cast<size_t>(standing->stage)];
  dict["step"] = standing->step;
  dict["since"] = static_cast<double>(standing->since_ms) / 1000;
  dict["detail"] = standing->detail;
  dict["sentence"] = sentence(rank, *standing);
  return dict;
}

/// One entry a rank; None for a rank that nobody has heard of.
py::dict standings(Replica& self) {
  PeerWatch::Lines lines;
  int first = 0;
  {
    const py::gil_scoped_release no_gil;
    if (const auto monitor = self.communicator().monitor()) {
      lines = monitor->lines();
    } else {
      lines.emplace_back(self.progress()->look());
      first = self.communicator().rank();
    }
  }
  py::dict result;
  for (size_t i = 0; i < lines.size(); ++i) {
    const int rank = first + static_cast<int>(i);
    result[py::int_(rank)] = as_dict(rank, lines[i]);
  }
  return result;
}

void on_signal(int /*number*/) { Monitor::request_dump(); }

}  // namespace

void bind_watch(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  m.def(
      "install_signal_handler", [](int number) { std::signal(number, on_signal); }, py::arg("number"),
      "On this signal the monitors print where all ranks stand.");

  m.def("checksum", &checksum, py::arg("tensor"), NoGil(), "One number for the bits, shape and dtype of a tensor.");

  reducer
      .def(
          "set_warning_observer",
          [](Replica& self, py::function observer) {
            auto function = held(std::move(observer));
            const py::gil_scoped_release no_gil;
            self.reducer().set_warning_observer([function](Code code, const std::string& text) {
              const py::gil_scoped_acquire gil;
              (*function)(static_cast<int>(code), text);
            });
          },
          py::arg("observer"), "`observer(code, text)` is called for every warning.")
      .def(
          "set_published_observer",
          [](Replica& self, py::function observer) {
            auto function = held(std::move(observer));
            const py::gil_scoped_release no_gil;
            self.reducer().set_published_observer([function](ParamId id) {
              const py::gil_scoped_acquire gil;
              (*function)(index(id));
            });
          },
          py::arg("observer"), "`observer(index)` is called after a parameter's mean gradient was published.")
      .def(
          "expect_local_backward", [](Replica& self) { self.reducer().expect_local_backward(); }, NoGil(),
          "Announces a backward whose gradients stay on this rank.")
      .def(
          "expects_backward", [](Replica& self) { return self.reducer().expects_backward(); }, NoGil(),
          "Forward has run, and what autograd saved of it may still be needed.")
      .def(
          "note_sync_switch", [](Replica& self, bool reduces) { self.reducer().note_sync_switch(reduces); },
          py::arg("reduces"), NoGil(), "The user's switch for reducing has been set.")
      .def(
          "sync_gradients", [](Replica& self) { self.reducer().sync_gradients(); }, NoGil(),
          "Reduces what was accumulated, without a forward. Collective.")
      .def(
          "expect_unused",
          [](Replica& self, const std::vector<size_t>& indices) {
            std::vector<ParamId> ids;
            for (const size_t i : indices) ids.push_back(param_id(i));
            self.reducer().expect_unused(ids);
          },
          py::arg("indices"), NoGil(), "Parameters that the next backward will probably not use.")
      .def(
          "watch_frozen",
          [](Replica& self, std::vector<at::Tensor> tensors, std::vector<std::string> names) {
            self.reducer().watch_frozen({.tensors = std::move(tensors), .names = std::move(names), .sparse = {}});
          },
          py::arg("tensors"), py::arg("names"), NoGil(), "Unfreezing one of these is an error at the next forward.")
      .def("assert_in_sync", &Replica::assert_in_sync, py::arg("tensors"), py::arg("names"), NoGil(),
           "Raises RuntimeError on every rank when a tensor differs between ranks. Collective.")
      .def(
          "mute", [](Replica& self, int code) { self.reducer().mute(static_cast<Code>(code)); }, py::arg("code"),
          NoGil(), "Never gives this warning again.")
      .def(
          "publish_failure",
          [](Replica& self, const std::string& text) {
            self.progress()->fail(text);
            if (const auto monitor = self.communicator().monitor()) monitor->publish_failure(text);
          },
          py::arg("text"), NoGil(), "Tells the other ranks that this one has failed.")
      .def(
          "max", [](Replica& self, const at::Tensor& data) { self.communicator().max(data)->wait(); }, py::arg("data"),
          NoGil(), "`data` becomes the largest value over ranks. Collective.")
      .def("standings", &standings, "Where every rank of the group stands, by rank.");
}

}  // namespace lockstep::python
