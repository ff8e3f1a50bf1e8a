# The Python side: lockstep._C, and _build.py that says what it was built for.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT TARGET lockstep::torch_python)
  message(FATAL_ERROR "lockstep: ${LibTorch_DIR} is a LibTorch without Python; use -DLOCKSTEP_PYTHON=OFF.")
endif()

# A pybind11 module with the pybind11 of torch, so that both share their types: a tensor or a process group crosses over.
# The first source defines the module, under the name TORCH_EXTENSION_NAME; a macro of that file alone, because all files
# that share a precompiled header must have equal macros.
function(lockstep_add_python_module target main_source)
  python_add_library(${target} MODULE WITH_SOABI ${main_source} ${ARGN})
  set_source_files_properties(${main_source} PROPERTIES COMPILE_DEFINITIONS TORCH_EXTENSION_NAME=${target})
  target_link_libraries(${target} PRIVATE lockstep lockstep_fmt lockstep_warnings lockstep::torch_python)
  target_compile_definitions(${target} PRIVATE TORCH_API_INCLUDE_EXTENSION_H)
  # pybind11's namespace is hidden; a class of ours that holds its types must not be more visible than they are.
  set_target_properties(${target} PROPERTIES DEFINE_SYMBOL "" CXX_VISIBILITY_PRESET hidden)
endfunction()

lockstep_add_python_module(_C
  csrc/python/module.cpp
  csrc/python/bind_communicator.cpp
  csrc/python/bind_hooks.cpp
  csrc/python/bind_reducer.cpp
  csrc/python/bind_times.cpp
  csrc/python/bind_watch.cpp
  csrc/python/python_hook.cpp
  csrc/python/torch_logger.cpp)
target_precompile_headers(_C PRIVATE csrc/python/pch.h)
# Installed: the package folder. torch is imported first, so its libraries are there already; the last path is for tools.
set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../torch/lib")

# None or a quoted string, as Python writes it.
function(lockstep_python_literal variable value)
  if(value)
    set(${variable} "\"${value}\"" PARENT_SCOPE)
  else()
    set(${variable} None PARENT_SCOPE)
  endif()
endfunction()

set(cuda_version)
if(LOCKSTEP_WITH_CUDA)
  set(cuda_version ${LibTorch_CUDA_VERSION})
endif()
lockstep_python_literal(LOCKSTEP_CUDA_LITERAL "${cuda_version}")
lockstep_python_literal(LOCKSTEP_NCCL_LITERAL "${LOCKSTEP_NCCL_VERSION}")
configure_file(cmake/_build.py.in ${PROJECT_BINARY_DIR}/_build.py @ONLY)
