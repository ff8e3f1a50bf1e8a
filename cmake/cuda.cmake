# Decides LOCKSTEP_WITH_CUDA and LOCKSTEP_WITH_NCCL from the option LOCKSTEP_CUDA and says why in one line.
#
# Nothing of a CUDA build needs a GPU or a driver, neither to build nor to be loaded: the runtime library is the one that
# torch loads too, and it looks for the driver at the first call.
#
#   lockstep_device_sources      files of csrc/kernels and csrc/comm that differ between the two builds
#   lockstep_cuda_kernels        the device code, an object library that needs no torch (CUDA builds only)
#   lockstep_cudart              headers and library of the CUDA runtime (CUDA builds only)
#   lockstep_cuda                the same, torch's CUDA part and NCCL (CUDA builds only)
#   LOCKSTEP_CUDA_RPATH          where an installed liblockstep.so finds them beside torch
#   LOCKSTEP_CUDA_LINK_DIRS      where they are on this machine
#   LOCKSTEP_NCCL_VERSION        of nccl.h, as 2.28.9

set(LOCKSTEP_WITH_CUDA OFF)
set(LOCKSTEP_WITH_NCCL OFF)
set(LOCKSTEP_NCCL_VERSION)
set(LOCKSTEP_CUDA_RPATH)
set(LOCKSTEP_CUDA_LINK_DIRS)
set(lockstep_device_sources csrc/kernels/no_cuda.cpp csrc/comm/no_nccl.cpp)

string(TOLOWER "${LOCKSTEP_CUDA}" lockstep_cuda_wanted)
if(NOT lockstep_cuda_wanted MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "lockstep: LOCKSTEP_CUDA is '${LOCKSTEP_CUDA}'; it takes auto, on or off.")
endif()

# Packages of CUDA from pip lie beside torch: nvidia/cu13 (nvcc, headers, libcudart) and nvidia/nccl.
string(REGEX MATCH "^[0-9]+" lockstep_cuda_major "${LibTorch_CUDA_VERSION}")
cmake_path(GET LibTorch_DIR PARENT_PATH lockstep_site_packages)
set(lockstep_pip_cuda ${lockstep_site_packages}/nvidia/cu${lockstep_cuda_major})
set(lockstep_pip_nccl ${lockstep_site_packages}/nvidia/nccl)

# Sets `reason` to what keeps `nvcc` from serving; empty when it compiles, for torch's CUDA major version.
function(lockstep_try_nvcc nvcc reason)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET)
  if(NOT text MATCHES "release ([0-9]+)\\.([0-9]+)")
    set(${reason} "${nvcc} does not say its version" PARENT_SCOPE)
    return()
  elseif(NOT CMAKE_MATCH_1 EQUAL lockstep_cuda_major)
    set(${reason} "${nvcc} is of CUDA ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}, torch is built with ${LibTorch_CUDA_VERSION}"
        PARENT_SCOPE)
    return()
  endif()
  # Packages from pip come one by one, and headers may be missing.
  set(source ${PROJECT_BINARY_DIR}/CMakeFiles/lockstep_try_nvcc.cu)
  file(WRITE ${source} "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <span>\n__global__ void nothing() {}\n")
  execute_process(COMMAND ${nvcc} -c -std=c++20 -ccbin ${CMAKE_CXX_COMPILER} ${source} -o ${source}.o
                  RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  string(REGEX MATCH "[^\n]*(error|fatal|not found)[^\n]*" text "${text}")
  if(status EQUAL 0)
    set(${reason} "" PARENT_SCOPE)
  else()
    set(${reason} "${nvcc} compiles nothing: ${text}" PARENT_SCOPE)
  endif()
endfunction()

# Sets `result` to the first nvcc that serves, else `reason` to why none does (the last one found, if any).
function(lockstep_find_nvcc result reason)
  set(why "no nvcc found")
  find_program(on_path nvcc NO_CACHE)
  foreach(candidate IN ITEMS "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin/nvcc" "${on_path}"
                             ${lockstep_pip_cuda}/bin/nvcc /usr/local/cuda/bin/nvcc)
    if(NOT EXISTS "${candidate}" OR IS_DIRECTORY "${candidate}")
      continue()
    endif()
    if(NOT candidate STREQUAL "${LOCKSTEP_NVCC}")
      lockstep_try_nvcc(${candidate} why)
    else()
      set(why "")
    endif()
    if(NOT why)
      set(${result} ${candidate} PARENT_SCOPE)
      set(LOCKSTEP_NVCC ${candidate} CACHE INTERNAL "The nvcc that was seen to work")
      return()
    endif()
  endforeach()
  set(${reason} "${why}" PARENT_SCOPE)
endfunction()

set(lockstep_no_cuda_because)
if(lockstep_cuda_wanted STREQUAL "off")
  set(lockstep_no_cuda_because "LOCKSTEP_CUDA=off")
elseif(NOT LibTorch_CUDA_VERSION)
  set(lockstep_no_cuda_because "this torch is built without CUDA")
else()
  lockstep_find_nvcc(lockstep_nvcc lockstep_no_cuda_because)
endif()

if(lockstep_no_cuda_because)
  if(lockstep_cuda_wanted STREQUAL "on")
    message(FATAL_ERROR "lockstep: LOCKSTEP_CUDA=on, but ${lockstep_no_cuda_because}; use auto or off for the CPU engine.")
  endif()
  message(STATUS "lockstep: building the CPU engine for torch ${LibTorch_VERSION} (${lockstep_no_cuda_because})")
  return()
endif()

set(LOCKSTEP_WITH_CUDA ON)
include(cuda_architectures)
file(REAL_PATH ${lockstep_nvcc} CMAKE_CUDA_COMPILER)
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
cmake_path(GET lockstep_nvcc PARENT_PATH lockstep_cuda_root)
cmake_path(GET lockstep_cuda_root PARENT_PATH lockstep_cuda_root)
# nvcc from pip looks for its libraries in lib64, which pip does not make; only CMake's own checks link anything.
if(NOT EXISTS ${lockstep_cuda_root}/lib64 AND EXISTS ${lockstep_cuda_root}/lib)
  set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -L${lockstep_cuda_root}/lib")
endif()
enable_language(CUDA)
set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # linked by name below
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()

# libcudart: torch's own, so that a program never holds two. Only its versioned name exists in the packages from pip.
find_library(LOCKSTEP_CUDART NAMES libcudart.so.${lockstep_cuda_major} cudart NO_CACHE REQUIRED NO_DEFAULT_PATH
             PATHS ${lockstep_pip_cuda}/lib ${LibTorch_DIR}/lib ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}
                   ${lockstep_cuda_root}/lib64 ${lockstep_cuda_root}/lib)
add_library(lockstep_cudart INTERFACE)
target_include_directories(lockstep_cudart SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(lockstep_cudart INTERFACE ${LOCKSTEP_CUDART})
add_library(lockstep_cuda INTERFACE)
target_link_libraries(lockstep_cuda INTERFACE
  lockstep_cudart ${LibTorch_DIR}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}c10_cuda${CMAKE_SHARED_LIBRARY_SUFFIX})
set(LOCKSTEP_CUDA_RPATH "$ORIGIN/../../nvidia/cu${lockstep_cuda_major}/lib")
cmake_path(GET LOCKSTEP_CUDART PARENT_PATH LOCKSTEP_CUDA_LINK_DIRS)

# Fast to compile because no header of torch comes near it.
add_library(lockstep_cuda_kernels OBJECT csrc/kernels/cuda/cast.cu csrc/kernels/cuda/pack.cu
            csrc/kernels/cuda/orthonormalize.cu csrc/kernels/cuda/power_iteration.cu csrc/kernels/cuda/quantize.cu)
target_include_directories(lockstep_cuda_kernels PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
target_compile_options(lockstep_cuda_kernels PRIVATE --Werror=all-warnings -Xcompiler=-Wall,-Wextra)
set_target_properties(lockstep_cuda_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_STANDARD 20 UNITY_BUILD OFF)
set(lockstep_device_sources csrc/kernels/cuda/capture.cpp csrc/kernels/cuda/on_device.cpp csrc/kernels/cuda/pack_cuda.cpp
    csrc/kernels/cuda/power_iteration_cuda.cpp csrc/kernels/cuda/quantize_cuda.cpp $<TARGET_OBJECTS:lockstep_cuda_kernels>)

# NCCL: torch's own from pip. Only a torch that brought none may share one of the system: two of them in one process are
# trouble.
if(EXISTS ${lockstep_pip_nccl})
  set(lockstep_nccl_search NO_DEFAULT_PATH PATHS ${lockstep_pip_nccl}/include ${lockstep_pip_nccl}/lib)
else()
  set(lockstep_nccl_search HINTS ${lockstep_cuda_root}/include ${lockstep_cuda_root}/lib64)
endif()
find_path(LOCKSTEP_NCCL_INCLUDE nccl.h NO_CACHE ${lockstep_nccl_search})
find_library(LOCKSTEP_NCCL NAMES libnccl.so.2 nccl NO_CACHE ${lockstep_nccl_search})
if(LOCKSTEP_NCCL_INCLUDE AND LOCKSTEP_NCCL)
  set(LOCKSTEP_WITH_NCCL ON)
  file(STRINGS ${LOCKSTEP_NCCL_INCLUDE}/nccl.h lockstep_nccl_lines REGEX "define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "#define NCCL_[A-Z]+ +" "" LOCKSTEP_NCCL_VERSION "${lockstep_nccl_lines}")
  list(JOIN LOCKSTEP_NCCL_VERSION . LOCKSTEP_NCCL_VERSION)
  target_include_directories(lockstep_cuda SYSTEM INTERFACE ${LOCKSTEP_NCCL_INCLUDE})
  # c10d's NCCL group lies in torch's CUDA library.
  target_link_libraries(lockstep_cuda INTERFACE
    ${LOCKSTEP_NCCL} ${LibTorch_DIR}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}torch_cuda${CMAKE_SHARED_LIBRARY_SUFFIX})
  list(APPEND LOCKSTEP_CUDA_RPATH "$ORIGIN/../../nvidia/nccl/lib")
  cmake_path(GET LOCKSTEP_NCCL PARENT_PATH nccl_dir)
  list(APPEND LOCKSTEP_CUDA_LINK_DIRS ${nccl_dir})
  list(APPEND lockstep_device_sources
    csrc/comm/flights.cpp csrc/comm/nccl_backend.cpp csrc/comm/nccl_communicator.cpp csrc/comm/nccl_handle.cpp
    csrc/comm/nccl_watchdog.cpp)
  set(lockstep_nccl_status "NCCL ${LOCKSTEP_NCCL_VERSION}")
else()
  list(APPEND lockstep_device_sources csrc/comm/no_nccl.cpp)
  set(lockstep_nccl_status "no NCCL found")
endif()

list(JOIN CMAKE_CUDA_ARCHITECTURES " " lockstep_architectures)
message(STATUS "lockstep: building the CUDA engine for torch ${LibTorch_VERSION} with ${lockstep_nvcc} "
               "(${lockstep_architectures}; ${lockstep_nccl_status})")
