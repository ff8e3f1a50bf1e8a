// The parts of the Python module, one function a file.
#pragma once

#include <torch/extension.h>

#include <memory>

namespace lockstep {
class Replica;
}

namespace lockstep::python {

void bind_communicator(py::module_& m);
void bind_reducer(py::module_& m);
void bind_logger(py::module_& m);
/// Adds to the class that `bind_reducer` made.
void bind_watch(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer);
void bind_times(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer);
void bind_hooks(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer);

}  // namespace lockstep::python
