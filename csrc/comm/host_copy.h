// Small tensors on their way between host and device, without making the host wait.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <chrono>
#include <optional>

#include "comm/communicator.h"

namespace lockstep {

/// When the host looks at an answer of the other ranks.
enum class Reading {
  kNow,    ///< At once, which on a device means waiting for it.
  kLater,  ///< One pass later, when it has long been there.
};

/// An uninitialised tensor of `numel` elements on the host, from which `sent_to` can copy without waiting.
[[nodiscard]] at::Tensor staging(int64_t numel, at::ScalarType dtype, at::Device target);

/// `staged` itself for a target on the host; else a copy that the target's current stream makes.
[[nodiscard]] at::Tensor sent_to(const at::Tensor& staged, at::Device target);

/// A copy on the host of a tensor on a device, made by the device's current stream. Tensors on the host are not copied.
class HostCopy {
 public:
  explicit HostCopy(const at::Tensor& source);

  /// Blocks until the copy is there, in pieces that let `comm` find out that waiting is hopeless.
  /// @throws  what `Communicator::outwait` does.
  const at::Tensor& await(Communicator& comm);
  /// Blocks for at most `patience`. Returns whether the copy is there, so that `await` returns it at once.
  bool wait_for(std::chrono::milliseconds patience);

 private:
  at::Tensor copy_;
  std::optional<c10::Event> made_;
};

}  // namespace lockstep
