#include "lockstep/connections.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <string>

namespace lockstep {
namespace {

std::string key_of(int rank) { return fmt::format("lockstep/end/{}", rank); }

void close(c10d::ProcessGroup& group, bool all_came) noexcept {
  try {
    if (all_came) {
      group.shutdown();
      return;
    }
  } catch (const std::exception&) {  // a collective has failed, so waiting for it is over
  }
  try {
    group.abort();
  } catch (const std::exception&) {  // nothing is left to try, and whoever lets go of a handle expects no exception
  }
}

}  // namespace

void Connections::add(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(std::move(group));
}

Connections::~Connections() {
  if (getpid() != process_) {
    for (auto& group : groups_) (void)group.release();
    return;
  }
  const bool others_counted_on = world_.size > 1 && std::uncaught_exceptions() == 0;
  const bool all_came = others_counted_on ? this->all_came() : world_.size == 1;
  for (; !groups_.empty(); groups_.pop_back()) close(*groups_.back(), all_came);
  if (others_counted_on && all_came) leave();
}

bool Connections::all_came() const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_.size; ++rank) keys.push_back(key_of(rank));
  try {
    world_.store->set(keys[static_cast<size_t>(world_.rank)], std::string("1"));
    world_.store->wait(keys, world_.patience);
    return true;
  } catch (const std::exception&) {
  }
  std::vector<int> missing;
  try {
    for (int rank = 0; rank < world_.size; ++rank) {
      if (!world_.store->check({keys[static_cast<size_t>(rank)]})) missing.push_back(rank);
    }
  } catch (const std::exception&) {  // the process that serves the store has gone: it had an error, and says which
    return false;
  }
  if (missing.empty()) return true;
  TORCH_WARN("[rank ", world_.rank, "] leaves without ", fmt::format("{}", fmt::join(missing, ", ")), ", ",
             missing.size() == 1 ? "which" : "each of which", " kept its process group ",
             static_cast<double>(world_.patience.count()) / 1000,
             " s longer, or has died. Collectives that were on their way are lost. Where ranks end at different "
             "times, let them wait for each other: group.barrier(timeout).");
  return false;
}

void Connections::leave() const {
  try {
    // The last one to leave says so; the process that serves the store leaves after it.
    if (world_.store->add("lockstep/left", 1) == world_.size) {
      world_.store->set("lockstep/all_left", std::string("1"));
    }
    if (world_.serves_store) world_.store->wait({"lockstep/all_left"}, world_.patience);
  } catch (const std::exception&) {  // a rank or the store has gone before: nobody to wait for
  }
}

}  // namespace lockstep
