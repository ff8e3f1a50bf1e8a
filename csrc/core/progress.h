// Where one replica stands: written by its own threads at every turn of a step, read by whoever watches it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep {

/// What a replica is doing. The order is that of a step.
enum class Stage : uint8_t {
  kConstruction,  ///< Being wrapped.
  kBetweenSteps,  ///< Nothing is announced: data loading, optimizer, evaluation.
  kForward,
  kBeforeBackward,  ///< Forward is done, backward has not reached us.
  kBackward,
  kBucketWait,  ///< Waits for the other ranks: for the mean of a bucket, or to agree on the pass.
  kBufferWait,  ///< Waits for the other ranks: for buffers, a plan, or the initial state.
  kGaveUp,      ///< A collective has failed, probably because of another rank: looks for that one, or has found it.
  kFailed,      ///< Has raised an error; nothing has happened since.
  kLeft,        ///< The model is gone.
  kLeftInStep,  ///< The model is gone, and had not finished its step.
};

[[nodiscard]] constexpr bool is_waiting(Stage stage) {
  return stage == Stage::kBucketWait || stage == Stage::kBufferWait;
}

[[nodiscard]] constexpr bool has_left(Stage stage) { return stage == Stage::kLeft || stage == Stage::kLeftInStep; }

/// Nothing follows. That the model is gone as well says less.
[[nodiscard]] constexpr bool has_ended(Stage stage) { return stage == Stage::kGaveUp || stage == Stage::kFailed; }

/// One glance at a replica.
struct Standing {
  uint64_t beat = 0;  ///< Grows with every sign of life.
  Stage stage = Stage::kConstruction;
  uint32_t step = 0;     ///< Forwards begun so far that build a graph.
  int64_t since_ms = 0;  ///< How long in this stage.
  /// The bucket waited for, or the text of the error (empty while its cause is looked for); in a stage that is no wait,
  /// what a call within it has been waiting for.
  std::string detail;
};

/// Costs one clock reading and two stores per turn; no lock, except for the texts of an error and of a new plan.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  using Labels = std::shared_ptr<const std::vector<std::string>>;

  void enter(Stage stage, size_t bucket = kNoBucket) {
    const uint64_t old = place_.load(std::memory_order_relaxed);
    store(stage, static_cast<uint32_t>(bucket), static_cast<uint32_t>(old));
  }
  /// Begins a forward.
  void next_step() {
    const uint64_t old = place_.load(std::memory_order_relaxed);
    store(Stage::kForward, kNoBucket, static_cast<uint32_t>(old) + 1);
  }
  void fail(std::string text) { end(Stage::kFailed, std::move(text)); }
  /// As `fail`, where the cause is another rank: whoever judges the two looks there first.
  void give_up(std::string text) { end(Stage::kGaveUp, std::move(text)); }
  /// One per bucket, for messages.
  void set_labels(Labels labels) {
    const std::lock_guard lock(texts_);
    labels_ = std::move(labels);
  }

  [[nodiscard]] Stage stage() const { return static_cast<Stage>(place_.load(std::memory_order_relaxed) >> 56); }
  [[nodiscard]] uint32_t step() const { return static_cast<uint32_t>(place_.load(std::memory_order_relaxed)); }
  [[nodiscard]] Standing look() const;

 private:
  static constexpr uint32_t kNoBucket = 0xFFFFFF;  // 24 bits

  void end(Stage stage, std::string text) {
    {
      const std::lock_guard lock(texts_);
      failure_ = std::move(text);
    }
    enter(stage);
  }
  void store(Stage stage, uint32_t bucket, uint32_t step) {
    since_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    place_.store(uint64_t{static_cast<uint8_t>(stage)} << 56 | uint64_t{bucket & kNoBucket} << 32 | step,
                 std::memory_order_relaxed);
  }

  std::atomic<uint64_t> place_ = uint64_t{kNoBucket} << 32;  // stage (8 bits), bucket (24), step (32)
  std::atomic<Clock::rep> since_ = Clock::now().time_since_epoch().count();
  mutable std::mutex texts_;
  std::string failure_;
  Labels labels_;
};

}  // namespace lockstep
