// Ranks as threads of one process: a communicator that exchanges tensors through shared memory.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "core/error.h"

namespace lockstep::testing {

/// How long a rank waits for the others before it gives up. No test hangs.
inline constexpr std::chrono::seconds kPatience{20};

/// What one collective of all ranks has in common. `finish` runs once, on the last rank to arrive.
struct Meeting {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  int arrived = 0;
  bool done = false;
};

class ThreadWorld {
 public:
  explicit ThreadWorld(int size) : size_(size) {}

  [[nodiscard]] int size() const { return size_; }

  /// The collectives of every rank are matched by their number.
  std::shared_ptr<Meeting> meet(int rank, int64_t number, at::Tensor output, at::Tensor input,
                                const std::function<void(Meeting&)>& finish) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Meeting>& meeting = meetings_[number];
    if (!meeting) {
      meeting = std::make_shared<Meeting>();
      meeting->inputs.resize(static_cast<size_t>(size_));
      meeting->outputs.resize(static_cast<size_t>(size_));
    }
    meeting->inputs[static_cast<size_t>(rank)] = std::move(input);
    meeting->outputs[static_cast<size_t>(rank)] = std::move(output);
    if (++meeting->arrived == size_) {
      finish(*meeting);
      meeting->done = true;
      changed_.notify_all();
    }
    return meeting;
  }

  void wait(const Meeting& meeting) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kPatience, [&] { return meeting.done; })) fail(Code::kStalled, "a rank did not come");
  }

 private:
  int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::shared_ptr<Meeting>> meetings_;
};

class ThreadTransfer final : public Transfer {
 public:
  ThreadTransfer(std::shared_ptr<ThreadWorld> world, std::shared_ptr<Meeting> meeting)
      : world_(std::move(world)), meeting_(std::move(meeting)) {}
  void wait() override { world_->wait(*meeting_); }

 private:
  std::shared_ptr<ThreadWorld> world_;
  std::shared_ptr<Meeting> meeting_;
};

/// One rank's end. Counts its collectives, which tests compare.
class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadWorld> world, int rank) : world_(std::move(world)), rank_(rank) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return world_->size(); }
  [[nodiscard]] std::string name() const override { return "threads"; }
  [[nodiscard]] int64_t num_calls() const { return calls_; }

  TransferPtr sum(at::Tensor data) override {
    return meet(data, data, [](Meeting& m) {
      at::Tensor total = m.inputs.front().clone();
      for (size_t r = 1; r < m.inputs.size(); ++r) total.add_(m.inputs[r]);
      for (at::Tensor& output : m.outputs) output.copy_(total);
    });
  }
  TransferPtr max(at::Tensor data) override {
    return meet(data, data, [](Meeting& m) {
      at::Tensor largest = m.inputs.front().clone();
      for (const at::Tensor& input : m.inputs) largest = at::maximum(largest, input);
      for (at::Tensor& output : m.outputs) output.copy_(largest);
    });
  }
  TransferPtr broadcast(at::Tensor data, int root) override {
    return meet(data, data, [root](Meeting& m) {
      for (at::Tensor& output : m.outputs) output.copy_(m.inputs[static_cast<size_t>(root)]);
    });
  }
  TransferPtr all_gather(at::Tensor output, at::Tensor input) override {
    return meet(output, input, [](Meeting& m) {
      for (at::Tensor& out : m.outputs) out.copy_(at::cat(m.inputs).view(out.sizes()));
    });
  }
  TransferPtr all_to_all(at::Tensor output, at::Tensor input) override {
    return meet(output, input, [](Meeting& m) {
      const auto ranks = static_cast<int64_t>(m.inputs.size());
      for (int64_t r = 0; r < ranks; ++r) {
        std::vector<at::Tensor> parts;
        for (const at::Tensor& in : m.inputs) parts.push_back(in.chunk(ranks)[static_cast<size_t>(r)]);
        m.outputs[static_cast<size_t>(r)].copy_(at::cat(parts));
      }
    });
  }
  TransferPtr reduce_scatter(at::Tensor output, at::Tensor input) override {
    return meet(output, input, [](Meeting& m) {
      at::Tensor total = m.inputs.front().clone();
      for (size_t r = 1; r < m.inputs.size(); ++r) total.add_(m.inputs[r]);
      const auto parts = total.chunk(static_cast<int64_t>(m.outputs.size()));
      for (size_t r = 0; r < m.outputs.size(); ++r) m.outputs[r].copy_(parts[r]);
    });
  }

 private:
  TransferPtr meet(at::Tensor output, at::Tensor input, const std::function<void(Meeting&)>& finish) {
    auto meeting = world_->meet(rank_, calls_++, std::move(output), std::move(input), finish);
    return std::make_unique<ThreadTransfer>(world_, std::move(meeting));
  }

  std::shared_ptr<ThreadWorld> world_;
  int rank_;
  int64_t calls_ = 0;
};

/// Runs `body(communicator)` on every rank, in a thread each, and rethrows the first exception.
inline void run_ranks(int size, const std::function<void(std::shared_ptr<ThreadCommunicator>)>& body) {
  auto world = std::make_shared<ThreadWorld>(size);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(std::make_shared<ThreadCommunicator>(world, rank));
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace lockstep::testing
