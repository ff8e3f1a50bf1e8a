# lockstep_fmt: fmt's headers, header-only. Torch's bundled copy first (the same version that torch's headers use),
# else an installed one. The core sees a folder that holds nothing but fmt: no torch header can slip in.

if(LibTorch_FOUND AND EXISTS ${LibTorch_INCLUDE_DIR}/fmt/format.h)
  set(lockstep_fmt_include ${PROJECT_BINARY_DIR}/fmt_headers)
  file(MAKE_DIRECTORY ${lockstep_fmt_include})
  file(REMOVE ${lockstep_fmt_include}/fmt)
  file(CREATE_LINK ${LibTorch_INCLUDE_DIR}/fmt ${lockstep_fmt_include}/fmt SYMBOLIC)
else()
  find_package(fmt QUIET)
  if(NOT fmt_FOUND)
    message(FATAL_ERROR "lockstep: fmt was not found, neither in torch's include folder nor installed; "
                        "install it (Debian: libfmt-dev).")
  endif()
  get_target_property(lockstep_fmt_include fmt::fmt-header-only INTERFACE_INCLUDE_DIRECTORIES)
endif()
message(STATUS "lockstep: fmt from ${lockstep_fmt_include}")

add_library(lockstep_fmt INTERFACE)
target_include_directories(lockstep_fmt SYSTEM INTERFACE ${lockstep_fmt_include})
target_compile_definitions(lockstep_fmt INTERFACE FMT_HEADER_ONLY)
