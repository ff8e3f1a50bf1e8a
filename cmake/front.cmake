# Programs on the C++ front: the examples, and, with LOCKSTEP_TESTS, its tests and the benchmark. They land in
# <build>/examples and <build>/front.
#
# torch/torch.h takes 20 s to parse, so all of them share one precompiled header, that of the first.

# All have the same flags: a precompiled header is only shared between equal ones.
function(lockstep_add_front_program target folder)
  add_executable(${target} ${ARGN})
  target_link_libraries(${target} PRIVATE lockstep lockstep_fmt lockstep_warnings)
  # Their time is spent in torch and in the engine; optimizing what torch's headers bring into them takes minutes.
  target_compile_options(${target} PRIVATE -O1)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder})
  if(target STREQUAL "digits")
    target_precompile_headers(digits PRIVATE <torch/torch.h>)
  else()
    target_precompile_headers(${target} REUSE_FROM digits)
  endif()
endfunction()

lockstep_add_front_program(digits examples csrc/examples/digits.cpp)
lockstep_add_front_program(gpt examples csrc/examples/gpt.cpp)
if(LOCKSTEP_TESTS)
  lockstep_add_front_program(front_worker front tests/cpp/front/front_worker.cpp)
  lockstep_add_front_program(cpp_step front benchmarks/cpp_step.cpp)
  lockstep_add_front_program(cpp_images front benchmarks/cpp_images.cpp
    benchmarks/$<IF:$<BOOL:${LOCKSTEP_WITH_CUDA}>,cpp_data_parallel,cpp_no_data_parallel>.cpp)
  if(LOCKSTEP_WITH_CUDA)  # torch::nn::parallel lies in torch's CUDA library
    target_link_libraries(cpp_images PRIVATE
      ${LibTorch_DIR}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}torch_cuda${CMAKE_SHARED_LIBRARY_SUFFIX} lockstep_cuda)
  endif()
  lockstep_add_front_program(lockstep_front_tests front
    tests/cpp/front/endings_test.cpp tests/cpp/front/front_failures_test.cpp tests/cpp/front/front_test.cpp
    tests/cpp/front/own_code_test.cpp)
endif()
