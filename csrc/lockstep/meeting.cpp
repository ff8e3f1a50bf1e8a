#include "lockstep/meeting.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <exception>

#include "core/error.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kPatienceWithReaders{5};

std::string key_of(const Meeting& meeting, int rank) { return fmt::format("{}/{}", meeting.key, rank); }

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

/// The ranks that have said nothing; empty also where the store does not answer any more.
std::vector<int> missing_ranks(const Meeting& meeting) {
  std::vector<int> missing;
  for (int rank = 0; rank < meeting.size; ++rank) {
    if (!meeting.store->check({key_of(meeting, rank)})) missing.push_back(rank);
  }
  return missing;
}

/// The last one to have read says so.
void leave(const Meeting& meeting) {
  if (meeting.store->add(meeting.key + "/read", 1) == meeting.size)
    meeting.store->set(meeting.key + "/all_read", std::string("1"));
  if (!meeting.serves_store) return;
  try {
    meeting.store->wait({meeting.key + "/all_read"}, kPatienceWithReaders);
  } catch (const std::exception&) {  // one has died meanwhile; what follows will say so
  }
}

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

constexpr char kGood = '+';
constexpr char kBad = '-';

}  // namespace

std::vector<std::string> exchange_words(const Meeting& meeting, const std::string& word) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < meeting.size; ++rank) keys.push_back(key_of(meeting, rank));
  try {
    meeting.store->set(key_of(meeting, meeting.rank), bytes(word));
    meeting.store->wait(keys, meeting.timeout);
    std::vector<std::string> words;
    for (const auto& key : keys) {
      const std::vector<uint8_t> value = meeting.store->get(key);
      words.emplace_back(value.begin(), value.end());
    }
    leave(meeting);
    return words;
  } catch (const std::exception& error) {
    std::vector<int> missing;
    try {
      missing = missing_ranks(meeting);
    } catch (const std::exception&) {
      fail(Code::kWorldIncomplete,
           "[rank {}] the store does not answer any more, while ranks were to {}: the process that serves it (rank 0, "
           "or "
           "torchrun's agent) has ended. Look for its error. ({})",
           meeting.rank, meeting.what, text_of(error));
    }
    if (missing.empty()) throw;
    fail(Code::kWorldIncomplete,
         "[rank {}] {} of {} ranks did not {} within {:.1f} s: missing {}. Look whether these processes were started, "
         "with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and what they printed last; raise the timeout if they "
         "need longer.",
         meeting.rank, missing.size(), meeting.size, meeting.what, static_cast<double>(meeting.timeout.count()) / 1000,
         fmt::join(missing, ", "));
  }
}

void together(const Meeting& meeting, const std::function<void()>& action) {
  std::string word(1, kGood);
  std::exception_ptr mine;
  try {
    action();
  } catch (const std::exception& error) {
    mine = std::current_exception();
    word = kBad + text_of(error);
  }
  std::vector<std::string> words;
  try {
    words = exchange_words(meeting, word);
  } catch (const std::exception&) {
    if (mine) std::rethrow_exception(mine);  // the cause, not that others are missing too
    throw;
  }
  if (mine) std::rethrow_exception(mine);
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (words[rank].front() == kBad) {
      fail(Code::kWrapFailed, "[rank {}] rank {} could not {}: {}", meeting.rank, rank, meeting.what,
           words[rank].substr(1));
    }
  }
}

}  // namespace lockstep
