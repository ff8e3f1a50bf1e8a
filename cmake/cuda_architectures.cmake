# Sets CMAKE_CUDA_ARCHITECTURES: what the user asked for, else TORCH_CUDA_ARCH_LIST, else the GPUs of this machine, else
# 80 and 90, with PTX of the latter for whatever comes later.
#
# TORCH_CUDA_ARCH_LIST is read as torch reads it: numbers such as "8.0;9.0a+PTX", separated by semicolons or spaces.

if(DEFINED CMAKE_CUDA_ARCHITECTURES)
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES)
if(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
  string(REGEX REPLACE "[ ,;]+" ";" lockstep_wanted "$ENV{TORCH_CUDA_ARCH_LIST}")
  foreach(entry IN LISTS lockstep_wanted)
    if(NOT entry MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(FATAL_ERROR "lockstep: TORCH_CUDA_ARCH_LIST holds '${entry}'; lockstep takes numbers such as 9.0 or 9.0+PTX.")
    endif()
    set(number ${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3})
    if(CMAKE_MATCH_4)
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${number})
    else()
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${number}-real)
    endif()
  endforeach()
else()
  find_program(LOCKSTEP_NVIDIA_SMI nvidia-smi NO_CACHE)
  if(LOCKSTEP_NVIDIA_SMI)
    execute_process(COMMAND ${LOCKSTEP_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE lockstep_found RESULT_VARIABLE lockstep_status ERROR_QUIET TIMEOUT 20)
    if(lockstep_status EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" lockstep_found "${lockstep_found}")
      string(REGEX REPLACE "([0-9]+)\\.([0-9])" "\\1\\2-real" CMAKE_CUDA_ARCHITECTURES "${lockstep_found}")
    endif()
  endif()
endif()

list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
