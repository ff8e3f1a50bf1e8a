# GoogleTest programs, and the Python module that only tests and benchmarks load.

find_package(GTest QUIET)
if(NOT TARGET GTest::gmock_main)
  message(FATAL_ERROR "lockstep: GoogleTest was not found; install it (Debian: libgtest-dev libgmock-dev), "
                      "or build without tests: -DLOCKSTEP_TESTS=OFF.")
endif()

# The tests of a program, in as many runs of it as `shards`; a run that hangs ends after `seconds`. Not one entry of
# CTest per test: loading torch takes longer than most of them.
function(lockstep_add_test target seconds shards)
  target_link_libraries(${target} PRIVATE GTest::gmock_main lockstep_warnings)
  math(EXPR last "${shards} - 1")
  foreach(shard RANGE ${last})
    add_test(NAME ${target}.${shard} COMMAND ${target})
    set_tests_properties(${target}.${shard} PROPERTIES
      TIMEOUT ${seconds} ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()

# lockstep_core_tests: runs without torch, so also under sanitizers.
add_executable(lockstep_core_tests
  tests/cpp/core/backward_tracker_test.cpp
  tests/cpp/core/bucket_plan_test.cpp
  tests/cpp/core/bucket_planner_test.cpp
  tests/cpp/core/peer_watch_test.cpp)
target_link_libraries(lockstep_core_tests PRIVATE lockstep_core)
lockstep_add_test(lockstep_core_tests 120 1)

if(LOCKSTEP_CORE_ONLY)
  return()
endif()

# lockstep_tests: the engine, with ranks as threads of one process.
add_executable(lockstep_tests
  tests/cpp/engine/c10d_communicator_test.cpp
  tests/cpp/engine/cast_test.cpp
  tests/cpp/engine/checksum_test.cpp
  tests/cpp/engine/communicator_test.cpp
  tests/cpp/engine/grad_buffers_test.cpp
  tests/cpp/engine/guard_test.cpp
  tests/cpp/engine/hook_contract_test.cpp
  tests/cpp/engine/in_place_test.cpp
  tests/cpp/engine/monitor_test.cpp
  tests/cpp/engine/pack_test.cpp
  tests/cpp/engine/reducer_test.cpp
  tests/cpp/engine/sparse_sum_test.cpp
  tests/cpp/engine/timed_communicator_test.cpp
  tests/cpp/engine/top_k_hook_test.cpp
  tests/cpp/engine/watched_communicator_test.cpp)
target_include_directories(lockstep_tests PRIVATE tests/cpp/engine)
target_link_libraries(lockstep_tests PRIVATE lockstep lockstep_fmt)
# -fPIC and not the -fPIE of programs: a precompiled header is only shared between equal flags.
target_compile_options(lockstep_tests PRIVATE -fPIC)
target_precompile_headers(lockstep_tests REUSE_FROM lockstep)
lockstep_add_test(lockstep_tests 180 4)

# lockstep_front_tests (cmake/front.cmake): the C++ front, with ranks as threads.
target_include_directories(lockstep_front_tests PRIVATE tests/cpp/front)
lockstep_add_test(lockstep_front_tests 180 1)

# lockstep_cuda_tests: kernels and NCCL. Each test says why it is skipped where GPUs are missing. Two entries of CTest and
# not one per test: starting CUDA takes longer than most of them. lockstep_pack_bench links no torch.
if(LOCKSTEP_WITH_CUDA)
  add_executable(lockstep_cuda_tests
    tests/cpp/cuda/cast_cuda_test.cpp tests/cpp/cuda/hook_kernels_test.cpp
    tests/cpp/cuda/moment_cuda_test.cpp tests/cpp/cuda/pack_cuda_test.cpp $<TARGET_OBJECTS:lockstep_cuda_kernels>)
  target_link_libraries(lockstep_cuda_tests PRIVATE lockstep lockstep_fmt lockstep_cuda lockstep_warnings GTest::gmock_main)
  set_target_properties(lockstep_cuda_tests PROPERTIES LINKER_LANGUAGE CXX UNITY_BUILD OFF)
  target_compile_options(lockstep_cuda_tests PRIVATE -fPIC)
  target_precompile_headers(lockstep_cuda_tests REUSE_FROM lockstep)
  add_test(NAME PackCuda COMMAND lockstep_cuda_tests --gtest_filter=*Pack*:*HookKernels*:MomentCuda*)
  set_tests_properties(PackCuda PROPERTIES TIMEOUT 300)
  if(LOCKSTEP_WITH_NCCL)
    target_sources(lockstep_cuda_tests PRIVATE tests/cpp/cuda/nccl_communicator_test.cpp)
    add_test(NAME NcclCommunicator COMMAND lockstep_cuda_tests --gtest_filter=Nccl*)
    set_tests_properties(NcclCommunicator PROPERTIES TIMEOUT 300 RUN_SERIAL ON)
  endif()

  add_executable(lockstep_pack_bench benchmarks/kernels/pack_bench.cpp $<TARGET_OBJECTS:lockstep_cuda_kernels>)
  target_include_directories(lockstep_pack_bench PRIVATE csrc)
  target_link_libraries(lockstep_pack_bench PRIVATE lockstep_cudart lockstep_warnings)
  target_compile_features(lockstep_pack_bench PRIVATE cxx_std_20)
  set_target_properties(lockstep_pack_bench PROPERTIES LINKER_LANGUAGE CXX)
endif()

# lockstep_testing: process groups for tests and benchmarks. Never installed; lies in <build>/testing, put that on
# PYTHONPATH (scripts/test.sh and pytest's settings do).
if(LOCKSTEP_PYTHON)
  lockstep_add_python_module(lockstep_testing tests/extension/module.cpp tests/extension/instant_group.cpp)
  target_include_directories(lockstep_testing PRIVATE tests/extension)
  target_precompile_headers(lockstep_testing REUSE_FROM _C)
  set_target_properties(lockstep_testing PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/testing)
endif()
