// What the wrapper must know of a kind of module: its tensors, its mode, and how to call it.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "lockstep/replicated_module.h"

namespace lockstep {

namespace detail {

inline bool has_sparse_gradient(const torch::nn::Module& module) {
  if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return embedding->options.sparse();
  if (const auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) return bag->options.sparse();
  return false;
}

/// Shared parameters and shared submodules count once, under their first name.
inline void add_tensors(const torch::nn::Module& module, const std::string& prefix,
                        std::unordered_set<const c10::TensorImpl*>& seen, ModuleTensors& all) {
  const auto is_new = [&seen](const at::Tensor& tensor) {
    return tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second;
  };
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (!is_new(item.value())) continue;
    all.parameter_names.push_back(prefix + item.key());
    all.parameters.push_back(item.value());
    all.sparse.push_back(has_sparse_gradient(module));
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (!is_new(item.value())) continue;
    all.buffer_names.push_back(prefix + item.key());
    all.buffers.push_back(item.value());
  }
  for (const auto& item : module.named_children()) {
    if (item.value()) add_tensors(*item.value(), prefix + item.key() + ".", seen, all);
  }
}

}  // namespace detail

/// Specialised for every kind of module that can be wrapped. This one serves std::shared_ptr<SomeImpl>.
template <typename Module>
struct ModuleTraits {
  static_assert(
      !std::is_base_of_v<torch::nn::Module, Module>,
      "wrap a module holder (TORCH_MODULE) or a std::shared_ptr of the module, so that the wrapper and you have "
      "the same module");
  using Impl = typename Module::element_type;

  static Impl& impl(Module& module) { return *module; }
  static const Impl& impl(const Module& module) { return *module; }
  static ModuleTensors tensors(const Module& module) {
    std::unordered_set<const c10::TensorImpl*> seen;
    ModuleTensors all;
    detail::add_tensors(*module, "", seen, all);
    return all;
  }
  static bool is_training(const Module& module) { return module->is_training(); }
  static void train(Module& module, bool on) { module->train(on); }
  template <typename... Args>
  static decltype(auto) forward(Module& module, Args&&... args) {
    return module->forward(std::forward<Args>(args)...);
  }
};

/// Of module holders: what TORCH_MODULE makes, torch::nn::Sequential, torch::nn::Linear.
template <typename Module>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Module>
struct ModuleTraits<Module> {
  using Impl = typename Module::ContainedType;
  using Pointer = ModuleTraits<std::shared_ptr<Impl>>;

  static Impl& impl(Module& module) { return *module; }
  static const Impl& impl(const Module& module) { return *module; }
  static ModuleTensors tensors(const Module& module) { return Pointer::tensors(module.ptr()); }
  static bool is_training(const Module& module) { return module->is_training(); }
  static void train(Module& module, bool on) { module->train(on); }
  template <typename... Args>
  static decltype(auto) forward(Module& module, Args&&... args) {
    return module->forward(std::forward<Args>(args)...);
  }
};

}  // namespace lockstep
