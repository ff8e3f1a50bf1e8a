// Transfers that can say when their collective ended, apart from being waited for.
#pragma once

#include <c10/core/Stream.h>

#include <functional>

namespace lockstep {

/// What a Transfer may also be. Transfers that pass calls on to another one pass these on too.
class KnownEnd {
 public:
  virtual ~KnownEnd() = default;

  /// Has `tell` called when the collective has ended, by whatever thread ends it; for collectives on the host.
  /// Returns false, and never calls it, where the backend does not say.
  virtual bool tell_end(const std::function<void()>& tell) = 0;

  /// Puts what `stream` is given from now on behind the collective, as `wait` does with the current stream, and leaves
  /// the transfer as it was. Returns false where there is no stream to lead.
  virtual bool lead(const c10::Stream& stream) = 0;
};

}  // namespace lockstep
