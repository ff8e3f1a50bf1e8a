// Wrapping a TorchScript module that was loaded from a file.
#pragma once

#include <torch/csrc/jit/api/module.h>

#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/module_traits.h"

namespace lockstep {

/// `DistributedDataParallel<torch::jit::Module>`: forward takes what an IValue can hold, or one std::vector<IValue> of
/// all arguments, and returns an IValue. Gradients of embeddings count as dense. Save the module itself:
/// `model.module().save`.
template <>
struct ModuleTraits<torch::jit::Module> {
  using Impl = torch::jit::Module;

  static Impl& impl(Impl& module) { return module; }
  static const Impl& impl(const Impl& module) { return module; }
  static ModuleTensors tensors(const Impl& module) {
    std::unordered_set<const c10::TensorImpl*> seen;
    ModuleTensors all;
    for (const auto& item : module.named_parameters()) {
      if (!seen.insert(item.value.unsafeGetTensorImpl()).second) continue;
      all.parameter_names.push_back(item.name);
      all.parameters.push_back(item.value);
      all.sparse.push_back(false);
    }
    for (const auto& item : module.named_buffers()) {
      if (!seen.insert(item.value.unsafeGetTensorImpl()).second) continue;
      all.buffer_names.push_back(item.name);
      all.buffers.push_back(item.value);
    }
    return all;
  }
  static bool is_training(const Impl& module) { return module.is_training(); }
  static void train(Impl& module, bool on) { module.train(on); }
  template <typename... Args>
  static c10::IValue forward(Impl& module, Args&&... args) {
    using All = std::vector<c10::IValue>;
    if constexpr (sizeof...(Args) == 1 && (std::is_same_v<std::remove_cvref_t<Args>, All> && ...)) {
      return module.forward(All(std::forward<Args>(args)...));
    } else {
      return module.forward({c10::IValue(std::forward<Args>(args))...});
    }
  }
};

}  // namespace lockstep
