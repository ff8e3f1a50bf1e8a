# Decides LOCKSTEP_WITH_CUDA and LOCKSTEP_WITH_NCCL from the option LOCKSTEP_CUDA and says why in one line.

set(lockstep_cuda_sources)  # csrc/kernels/cuda/*.cu, by name; none yet

find_program(LOCKSTEP_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME PATH_SUFFIXES bin)
mark_as_advanced(LOCKSTEP_NVCC)
string(TOLOWER "${LOCKSTEP_CUDA}" lockstep_cuda_wanted)
if(NOT lockstep_cuda_wanted MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "lockstep: LOCKSTEP_CUDA is '${LOCKSTEP_CUDA}'; it takes auto, on or off.")
endif()

set(lockstep_no_cuda_because)
if(lockstep_cuda_wanted STREQUAL "off")
  set(lockstep_no_cuda_because "LOCKSTEP_CUDA=off")
elseif(NOT LibTorch_CUDA_VERSION)
  set(lockstep_no_cuda_because "this torch is built without CUDA")
elseif(NOT LOCKSTEP_NVCC)
  set(lockstep_no_cuda_because "no nvcc found")
elseif(NOT lockstep_cuda_sources)
  set(lockstep_no_cuda_because "this version of lockstep has no CUDA kernels yet")
endif()

if(lockstep_no_cuda_because)
  if(lockstep_cuda_wanted STREQUAL "on")
    message(FATAL_ERROR "lockstep: LOCKSTEP_CUDA=on, but ${lockstep_no_cuda_because}; use auto or off for the CPU engine.")
  endif()
  set(LOCKSTEP_WITH_CUDA OFF)
  message(STATUS "lockstep: building the CPU engine for torch ${LibTorch_VERSION} (${lockstep_no_cuda_because})")
else()
  set(LOCKSTEP_WITH_CUDA ON)
  message(STATUS "lockstep: building the CUDA engine for torch ${LibTorch_VERSION} with ${LOCKSTEP_NVCC}")
endif()
set(LOCKSTEP_WITH_NCCL ${LOCKSTEP_WITH_CUDA})
