# Finds torch's C++ headers and libraries and makes the target lockstep::torch of them.
#
# Torch's own TorchConfig.cmake of a CUDA build demands a CUDA toolkit. Programs that only use ATen and c10d do not need
# one, so this looks for the files directly. In order: LOCKSTEP_TORCH_DIR, CMAKE_PREFIX_PATH (Torch_DIR too), and the
# torch that the Python interpreter would import.
#
#   LibTorch_DIR  LibTorch_INCLUDE_DIR  LibTorch_VERSION     where and what it is
#   LibTorch_CUDA_VERSION                                    of the CUDA that torch was built with, or empty
#   lockstep::torch_python                                   what Python bindings link; only where torch has it

set(_torch_candidates ${LOCKSTEP_TORCH_DIR})
foreach(_prefix IN LISTS CMAKE_PREFIX_PATH Torch_DIR)
  # torch.utils.cmake_prefix_path is torch/share/cmake; a LibTorch archive is its own prefix.
  list(APPEND _torch_candidates ${_prefix} ${_prefix}/../.. ${_prefix}/../../..)
endforeach()
# An explicit folder is never replaced silently by another torch.
if(NOT LOCKSTEP_TORCH_DIR)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    # Importing torch takes seconds; knowing where it lies does not.
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _torch_of_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND _torch_candidates ${_torch_of_python})
  endif()
endif()

set(LibTorch_DIR LibTorch_DIR-NOTFOUND)
foreach(_candidate IN LISTS _torch_candidates)
  if(EXISTS ${_candidate}/include/torch/csrc/api/include/torch/version.h AND EXISTS ${_candidate}/lib)
    file(REAL_PATH ${_candidate} LibTorch_DIR)
    break()
  endif()
endforeach()

set(LibTorch_VERSION)
set(LibTorch_CUDA_VERSION)
if(LibTorch_DIR)
  set(LibTorch_INCLUDE_DIR ${LibTorch_DIR}/include)
  set(_version_header ${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h)
  if(NOT EXISTS ${_version_header})  # before torch 2.9
    set(_version_header ${LibTorch_INCLUDE_DIR}/torch/csrc/api/include/torch/version.h)
  endif()
  file(READ ${_version_header} _version_text)
  set(_numbers)
  foreach(_part MAJOR MINOR PATCH)
    string(REGEX MATCH "TORCH_VERSION_${_part} ([0-9]+)" _ "${_version_text}")
    list(APPEND _numbers ${CMAKE_MATCH_1})
  endforeach()
  list(JOIN _numbers . LibTorch_VERSION)

  # The wheel says it in version.py, the archive in build-version (2.11.0+cu130).
  if(EXISTS ${LibTorch_DIR}/version.py)
    file(STRINGS ${LibTorch_DIR}/version.py _cuda_line REGEX "^cuda[ :=]")
    if(_cuda_line MATCHES "'([0-9.]+)'")
      set(LibTorch_CUDA_VERSION ${CMAKE_MATCH_1})
    endif()
  elseif(EXISTS ${LibTorch_DIR}/build-version)
    file(READ ${LibTorch_DIR}/build-version _build_version)
    if(_build_version MATCHES "\\+cu([0-9]+)([0-9])")
      set(LibTorch_CUDA_VERSION ${CMAKE_MATCH_1}.${CMAKE_MATCH_2})
    endif()
  endif()
endif()

# One sentence each, instead of CMake's own list of variables.
if(LibTorch_FIND_REQUIRED AND NOT LibTorch_DIR AND LOCKSTEP_TORCH_DIR)
  message(FATAL_ERROR "lockstep: LOCKSTEP_TORCH_DIR (${LOCKSTEP_TORCH_DIR}) holds no torch: expected include/ and lib/.")
elseif(LibTorch_FIND_REQUIRED AND NOT LibTorch_DIR)
  message(FATAL_ERROR "lockstep: torch was not found: install it (pip install torch) for the Python that is used "
                      "(${Python_EXECUTABLE}), choose another Python with -DPython_EXECUTABLE=, "
                      "or say where torch lies with -DLOCKSTEP_TORCH_DIR=.")
elseif(LibTorch_FIND_REQUIRED AND LibTorch_VERSION VERSION_LESS LibTorch_FIND_VERSION)
  message(FATAL_ERROR "lockstep: needs torch ${LibTorch_FIND_VERSION} or newer, "
                      "but ${LibTorch_DIR} has ${LibTorch_VERSION}.")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS LibTorch_DIR LibTorch_INCLUDE_DIR VERSION_VAR LibTorch_VERSION)

if(LibTorch_FOUND AND NOT TARGET lockstep::torch)
  set(_lib ${LibTorch_DIR}/lib/${CMAKE_SHARED_LIBRARY_PREFIX})
  set(_suffix ${CMAKE_SHARED_LIBRARY_SUFFIX})
  add_library(lockstep::torch INTERFACE IMPORTED)
  target_include_directories(lockstep::torch SYSTEM INTERFACE
                             ${LibTorch_INCLUDE_DIR} ${LibTorch_INCLUDE_DIR}/torch/csrc/api/include)
  target_compile_definitions(lockstep::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
  # libtorch.so only pulls in the others: that of a CUDA build registers the CUDA kernels when it is loaded, though no
  # symbol of it is used. So it must survive linkers that drop such libraries.
  target_link_libraries(lockstep::torch INTERFACE
    -Wl,--push-state,--no-as-needed ${_lib}torch${_suffix} -Wl,--pop-state
    ${_lib}torch_cpu${_suffix} ${_lib}c10${_suffix})
  if(EXISTS ${_lib}torch_python${_suffix})
    add_library(lockstep::torch_python INTERFACE IMPORTED)
    target_link_libraries(lockstep::torch_python INTERFACE lockstep::torch ${_lib}torch_python${_suffix})
  endif()
endif()
