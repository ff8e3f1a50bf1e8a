// Ranks that watch each other through a store, each with a monitor of its own in one process.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "comm/monitor.h"

namespace lockstep {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

inline constexpr milliseconds kThreshold{400};
inline constexpr std::chrono::seconds kPatience{20};
inline constexpr milliseconds kStep{20};

/// A store that can be cut off, as if the process that hosts it had died.
class FragileStore final : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    check_alive();
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    check_alive();
    std::this_thread::sleep_for(delay_.load());
    return HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    check_alive();
    return HashStore::check(keys);
  }
  void cut() { alive_ = false; }
  void slow_down(milliseconds delay) { delay_ = delay; }

 private:
  void check_alive() const {
    if (!alive_) throw std::runtime_error("Broken pipe");
  }
  std::atomic<bool> alive_ = true;
  std::atomic<milliseconds> delay_{};
};

inline bool eventually(const std::function<bool()>& condition) {
  const auto deadline = steady_clock::now() + kPatience;
  while (!condition()) {
    if (steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kStep);
  }
  return true;
}

struct Ranks {
  explicit Ranks(int size, milliseconds threshold = kThreshold) : store(c10::make_intrusive<FragileStore>()) {
    for (int rank = 0; rank < size; ++rank) {
      progress.push_back(std::make_shared<Progress>());
      monitors.push_back(std::make_shared<Monitor>(store, rank, size, progress.back(), threshold));
    }
  }

  /// That rank has written `stage` once, and dies.
  void kill(size_t rank, Stage stage) {
    monitors[rank].reset();
    Standing last;
    last.beat = 77;
    last.stage = stage;
    last.step = 1;
    const std::string line = encode(last);
    store->set(std::to_string(rank), std::vector<uint8_t>(line.begin(), line.end()));
  }

  /// Whether the others can read that this rank is at `stage` of `step`.
  [[nodiscard]] bool has_said(size_t rank, Stage stage, int64_t step) const {
    const std::string key = std::to_string(rank);
    if (!store->check({key})) return false;
    const std::vector<uint8_t> line = store->get(key);
    const auto standing = decode(std::string(line.begin(), line.end()));
    return standing && standing->stage == stage && standing->step == step;
  }

  [[nodiscard]] std::string verdict(size_t rank) const {
    try {
      monitors[rank]->raise_if_hopeless();
      return "";
    } catch (const PeerError& error) {
      return error.what();
    }
  }

  c10::intrusive_ptr<FragileStore> store;
  std::vector<std::shared_ptr<Progress>> progress;
  std::vector<std::shared_ptr<Monitor>> monitors;
};

/// What is printed on stderr until `phrase` is among it, or for as long as a test has patience.
inline std::string printed(const std::string& phrase) {
  std::string text;
  (void)eventually([&] {
    ::testing::internal::CaptureStderr();
    std::this_thread::sleep_for(5 * kStep);
    text += ::testing::internal::GetCapturedStderr();
    return text.find(phrase) != std::string::npos;
  });
  return text;
}

}  // namespace lockstep
