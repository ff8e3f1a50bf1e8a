// The parts of the Python module, one function a file.
#pragma once

#include <torch/extension.h>

namespace lockstep::python {

void bind_communicator(py::module_& m);
void bind_reducer(py::module_& m);
void bind_logger(py::module_& m);

}  // namespace lockstep::python
