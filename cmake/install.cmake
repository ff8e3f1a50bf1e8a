# What `cmake --install` lays down. The Python package folder is one such prefix: find_package(lockstep) works from it,
# as torch's C++ side does from torch's folder.
#
#   lib/liblockstep.so  lib/cmake/lockstep/      component cpp
#   include/lockstep/lockstep.h and those beside it; include/lockstep/engine: the layers below, which they include
#   _C.*.so  _build.py                                              component python, only wanted by setup.py

include(CMakePackageConfigHelpers)
set(config_dir lib/cmake/lockstep)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" LibTorch_VERSION_MINOR_ONLY ${LibTorch_VERSION})

# First beside the engine, as in site-packages, so that a package may be moved together with its torch; then where torch
# was when this was built: an engine that was installed in place (pip install -e) or under a prefix has no torch beside it.
# INSTALL_RPATH_USE_LINK_PATH would leave out a torch below the source folder, such as that of .venv.
set_target_properties(lockstep PROPERTIES
  INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib;${LOCKSTEP_CUDA_RPATH};${LibTorch_DIR}/lib;${LOCKSTEP_CUDA_LINK_DIRS}")
install(TARGETS lockstep EXPORT lockstep_targets LIBRARY DESTINATION lib COMPONENT cpp)
install(DIRECTORY csrc/lockstep/ DESTINATION include/lockstep COMPONENT cpp FILES_MATCHING PATTERN "*.h")
install(DIRECTORY csrc/ DESTINATION include/lockstep/engine COMPONENT cpp
        FILES_MATCHING PATTERN "*.h" PATTERN "pch.h" EXCLUDE PATTERN "python" EXCLUDE PATTERN "gloo_headers" EXCLUDE
        PATTERN "examples" EXCLUDE PATTERN "csrc/lockstep" EXCLUDE)
install(EXPORT lockstep_targets NAMESPACE lockstep:: DESTINATION ${config_dir} COMPONENT cpp)

configure_package_config_file(cmake/lockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/lockstepConfig.cmake ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
              cmake/FindLibTorch.cmake
        DESTINATION ${config_dir} COMPONENT cpp)

if(LOCKSTEP_PYTHON)
  install(TARGETS _C LIBRARY DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
  install(FILES ${PROJECT_BINARY_DIR}/_build.py DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
endif()
