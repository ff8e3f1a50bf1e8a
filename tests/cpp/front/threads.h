// Ranks as threads of this process, connected by real gloo groups that meet in a store in memory.
#pragma once

#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "lockstep/lockstep.h"

namespace lockstep::testing {

/// Torch's flight recorder notes the groups of a process in a map that no lock protects, and threads that each have a
/// group of their own can crash in it. It asks this variable at the first collective.
inline const int kNoFlightRecorder = setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);

/// No rank waits longer than this for another one.
inline constexpr std::chrono::seconds kPatience{20};

inline GroupOptions quick_options() {
  static std::atomic<int> worlds = 0;
  return GroupOptions{}.timeout(kPatience).start_timeout(kPatience).name("world" + std::to_string(worlds++));
}

/// Runs `body(rank, store)` on every rank. One text a rank: of what it threw, or empty.
inline std::vector<std::string> outcomes(int size,
                                         const std::function<void(int, const c10::intrusive_ptr<c10d::Store>&)>& body) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> texts(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, store);
      } catch (const Error& error) {
        texts[static_cast<size_t>(rank)] = error.what();
      } catch (const std::exception& error) {
        texts[static_cast<size_t>(rank)] = std::string("not of lockstep: ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

/// The same with a group that all ranks have joined.
inline std::vector<std::string> outcomes_in_group(int size, const std::function<void(const ProcessGroup&)>& body) {
  const GroupOptions options = quick_options();
  return outcomes(size, [&](int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    body(init_process_group({.rank = rank, .world_size = size}, options, store));
  });
}

/// Whatever any rank throws is thrown.
inline void on_ranks(int size, const std::function<void(const ProcessGroup&)>& body) {
  for (const std::string& text : outcomes_in_group(size, body)) {
    if (!text.empty()) throw std::runtime_error(text);
  }
}

}  // namespace lockstep::testing
