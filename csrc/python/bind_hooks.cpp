// Comm hooks: the registry, which hook reduces, and what it keeps between steps.
#include "api/replica.h"
#include "hooks/registry.h"
#include "python/bindings.h"
#include "python/python_hook.h"

namespace lockstep::python {
namespace {

using Arguments = std::map<std::string, HookValue>;

HookArgs hook_args(const Arguments& arguments) {
  HookArgs args;
  for (const auto& [name, value] : arguments) args.set(name, value);
  return args;
}

/// Name, fidelity, and of every argument its name, default and meaning.
py::list registry() {
  static constexpr const char* kFidelities[] = {"exact", "half", "quantized", "low_rank"};
  py::list rows;
  for (const HookEntry& row : comm_hooks()) {
    py::list params;
    for (const HookParam& param : row.params) {
      params.append(py::make_tuple(std::string(param.name), param.fallback, std::string(param.meaning)));
    }
    rows.append(py::make_tuple(std::string(row.name), kFidelities[static_cast<size_t>(row.fidelity)], params));
  }
  return rows;
}

}  // namespace

void bind_hooks(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  m.def("comm_hooks", &registry,
        "The hooks of the engine: (name, fidelity, [(argument, default, meaning), ...]) each.");

  reducer
      .def(
          "set_comm_hook",
          [](Replica& self, const std::string& name, const Arguments& args) {
            self.reducer().set_hook(make_comm_hook(name, hook_args(args)));
          },
          py::arg("name"), py::arg("args") = Arguments(), NoGil(),
          "Selects a hook of the engine by name. Between steps only.")
      .def(
          "set_python_hook",
          [](Replica& self, py::object state, py::object hook, std::string name) {
            auto adapter = make_python_hook(std::move(state), std::move(hook), std::move(name));
            const py::gil_scoped_release no_gil;
            self.reducer().set_hook(std::move(adapter));
          },
          py::arg("state"), py::arg("hook"), py::arg("name"), "Selects a hook written for torch. Between steps only.")
      .def(
          "hook_state", [](Replica& self) { return self.reducer().hook_state(); }, NoGil(),
          "What the hook keeps between steps, copied. Between steps only.")
      .def(
          "load_hook_state", [](Replica& self, const HookState& state) { self.reducer().load_hook_state(state); },
          py::arg("state"), NoGil(), "Gives the hook a saved state. Between steps only.")
      .def(
          "hook_signature", [](Replica& self) { return self.reducer().hook_signature(); }, NoGil(),
          "Name and arguments of the hook, which must be equal on all ranks.")
      .def(
          "hook_stats",
          [](Replica& self) {
            const HookStats stats = self.reducer().hook_stats();
            return std::array<int64_t, 3>{stats.steps, stats.numel_before, stats.numel_after};
          },
          NoGil(), "Passes, and elements before and after compression.");
}

}  // namespace lockstep::python
