// Python objects that C++ threads may keep and drop without holding the GIL.
#pragma once

#include <memory>
#include <utility>

#include "python/bindings.h"

namespace lockstep::python {

/// Takes the GIL to drop the function.
inline std::shared_ptr<py::function> held(py::function function) {
  return {new py::function(std::move(function)), [](py::function* kept) {
            const py::gil_scoped_acquire gil;
            delete kept;
          }};
}

}  // namespace lockstep::python
