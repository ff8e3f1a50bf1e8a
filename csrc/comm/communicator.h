// Talking to the other ranks, as the engine sees it: the collectives, and a handle for each one on its way.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace lockstep {

class Monitor;

/// A collective on its way. Destroying it does not cancel the collective.
class Transfer {
 public:
  virtual ~Transfer() = default;

  /// Orders what follows after the collective: the host waits on CPU, the current stream waits on a device.
  /// @throws lockstep::Error or c10::Error  the collective failed or timed out. May be called once.
  virtual void wait() = 0;

  /// Like `wait`, but gives up after about `patience` and returns false; may be called again then. A backend that
  /// cannot give up waits for the end.
  virtual bool wait_for(std::chrono::milliseconds /*patience*/) {
    wait();
    return true;
  }
};

using TransferPtr = std::unique_ptr<Transfer>;

/// A fixed set of ranks. Every rank must issue the same list of calls, with tensors of equal size and dtype.
///
/// All tensors are dense and contiguous unless said otherwise, and must stay alive and untouched until `wait` has
/// returned. Calls return at once; one thread at a time may issue them.
class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// For messages and logs: "gloo", "nccl", "local".
  [[nodiscard]] virtual std::string name() const = 0;

  /// `data` becomes the sum over ranks, bit-equal on all of them. `data` may be sparse COO where the backend can; part
  /// of such a sum may be issued when it is waited for, which every rank must then do at the same point of the list.
  virtual TransferPtr sum(at::Tensor data) = 0;
  /// Every tensor becomes its sum over ranks, as one transfer: one launch where the backend can group them.
  virtual TransferPtr sum_all(std::span<const at::Tensor> tensors);
  /// `data` becomes the largest value over ranks, element by element.
  virtual TransferPtr max(at::Tensor data) = 0;
  /// `data` becomes the mean over ranks: divided by the number of ranks in its own dtype, then summed.
  virtual TransferPtr average(at::Tensor data);
  /// Every tensor becomes its mean over ranks, as one transfer.
  virtual TransferPtr average_all(std::span<const at::Tensor> tensors);
  /// Bytes from which a tensor is better averaged by itself, in the list of an `average_all`, than copied into a larger
  /// one and back. Empty: never, because `average_all` makes passes or launches of its own for each tensor. Equal on
  /// all ranks.
  [[nodiscard]] virtual std::optional<int64_t> worth_averaging_alone() const { return std::nullopt; }
  /// `data` becomes that of rank `root`.
  virtual TransferPtr broadcast(at::Tensor data, int root) = 0;
  /// `output` (size() * n elements) becomes the `input` (n elements) of rank 0, 1, ...
  virtual TransferPtr all_gather(at::Tensor output, at::Tensor input) = 0;
  /// Chunk r of `input` goes to rank r; `output` receives one chunk from each rank, in rank order. Equal sizes, and
  /// both divisible by size().
  virtual TransferPtr all_to_all(at::Tensor output, at::Tensor input) = 0;
  /// `output` (n elements) becomes the sum over ranks of chunk rank() of `input` (size() * n elements).
  virtual TransferPtr reduce_scatter(at::Tensor output, at::Tensor input) = 0;

  /// Later collectives travel apart from those that others issue in the same group, where the backend can do that.
  /// Collective, while no collective of this communicator is on its way.
  /// @throws  a rank did not join in time.
  virtual void isolate() {}

  /// Ends what is on its way on a device, where another rank will never take part: streams go on, results are of no
  /// use. Later calls raise. On the host nothing, because its waits give up by themselves. May be called from any
  /// thread.
  /// @param report  why, with its code.
  /// @returns       whether there was anything to abort.
  virtual bool abort(const std::string& /*report*/) { return false; }

  /// Blocks until `wait_for(patience)` returns true: for waits that are not those of a Transfer.
  /// @throws lockstep::Error  `timeout` has passed.
  virtual void outwait(const std::function<bool(std::chrono::milliseconds)>& wait_for);
  /// How long a rank waits for the others before it is an error.
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const { return std::chrono::minutes(30); }
  /// What knows where the other ranks stand, or null.
  [[nodiscard]] virtual std::shared_ptr<Monitor> monitor() const { return nullptr; }
};

}  // namespace lockstep
