// All ranks say a word each, through a store: for what must be known before there is a process group, or without it.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace lockstep {

/// The ranks that take part, and how they meet.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;
  std::string key;  ///< No other meeting in this store has it.
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  std::string what;           ///< What the ranks do, for messages: "start", "reach barrier 3".
  bool serves_store = false;  ///< Without this process the others cannot read any more.
};

/// Answers with the words of all ranks, by rank. Collective. The rank that serves the store goes on when all have read:
/// what it read may be why it will end.
/// @throws lockstep::Error  a rank did not come in time; names the ranks that are missing.
[[nodiscard]] std::vector<std::string> exchange_words(const Meeting& meeting, const std::string& word);

/// Runs `action` on every rank and lets all go on only where it threw on none. Collective.
/// @throws  what `action` threw; lockstep::Error  with the first other rank's text where it threw there only.
void together(const Meeting& meeting, const std::function<void()>& action);

}  // namespace lockstep
