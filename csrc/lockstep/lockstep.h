// All of the C++ front: data parallel for LibTorch programs, with no Python in the process.
//
//   process_group.h   joining the other processes          data_parallel.h   the wrapper
//   options.h         what may be chosen                   function_hook.h   comm hooks from a lambda
//   metrics.h         printing once, means over ranks      sampler.h         for torch::data
//   tensors_in.h      structs that forward returns         script_module.h   torch::jit::Module
//
// Failures of the engine are lockstep::Error (core/error.h), whose text ends with a code that docs/errors.md explains.
#pragma once

#include "core/error.h"
#include "lockstep/data_parallel.h"
#include "lockstep/function_hook.h"
#include "lockstep/launch.h"
#include "lockstep/metrics.h"
#include "lockstep/options.h"
#include "lockstep/process_group.h"
#include "lockstep/sampler.h"
#include "lockstep/script_module.h"
#include "lockstep/tensors_in.h"
