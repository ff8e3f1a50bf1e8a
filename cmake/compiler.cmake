# Compiler settings of our own code: C++20, warnings as errors, ccache. Torch's headers are SYSTEM and exempt.

set(LOCKSTEP_MINIMUM_TORCH 2.11)

if(NOT "cxx_std_20" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
  message(FATAL_ERROR "lockstep: ${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}) has no "
                      "C++20; use g++ 11 or clang++ 14, or newer (set CXX or CMAKE_CXX_COMPILER).")
endif()
# Some compilers accept -std=c++20 without the library that belongs to it, so try what the headers of lockstep need.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS ${CMAKE_CXX20_STANDARD_COMPILE_OPTION})
check_cxx_source_compiles([[
  #include <concepts>
  #include <span>
  enum class Id : unsigned {};
  template <std::integral T> T first(std::span<const T> values) { return values[0]; }
  int main() { using enum Id; const int one[] = {0}; return first<int>(one); }
]] LOCKSTEP_HAVE_CXX20)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT LOCKSTEP_HAVE_CXX20)
  message(FATAL_ERROR "lockstep: ${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}) compiles "
                      "no C++20; use g++ 11 or clang++ 14, or newer (set CXX or CMAKE_CXX_COMPILER).")
endif()

set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

# lockstep_warnings: linked PRIVATE, so that users compile with their own taste. Warnings are errors with the compilers
# that the sources are kept clean for; newer ones find fault with torch's headers too (g++ 13: torch/data).
add_library(lockstep_warnings INTERFACE)
set(known_compiler $<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>)
target_compile_options(lockstep_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion;$<${known_compiler}:-Werror>>)

# LOCKSTEP_SANITIZE: the whole build under -fsanitize=...; set by the asan and tsan presets.
set(LOCKSTEP_SANITIZE "" CACHE STRING "Sanitizers for the whole build, e.g. address,undefined")
if(LOCKSTEP_SANITIZE)
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${LOCKSTEP_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
endif()

# ccache: with these settings it also caches what is compiled with a precompiled header.
find_program(LOCKSTEP_CCACHE ccache)
mark_as_advanced(LOCKSTEP_CCACHE)
if(LOCKSTEP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${LOCKSTEP_CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")
  endif()
endif()
