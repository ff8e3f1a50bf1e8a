// Command lines of the examples: "--name value" and "--flag", each of which the program declares.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep::examples {

/// The command line makes no sense.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Arguments {
 public:
  Arguments(int count, char** values) : words_(values + 1, values + count) {}

  [[nodiscard]] std::string text(const std::string& name, const std::string& otherwise) {
    help_ += fmt::format("  --{:<12} default: {}\n", name, otherwise.empty() ? "none" : otherwise);
    for (size_t i = 0; i < words_.size(); ++i) {
      if (words_[i] != "--" + name) continue;
      if (i + 1 == words_.size()) throw UsageError(fmt::format("--{} needs a value", name));
      taken_.insert(i);
      taken_.insert(i + 1);
      return words_[i + 1];
    }
    return otherwise;
  }
  [[nodiscard]] int64_t whole(const std::string& name, int64_t otherwise, int64_t lowest) {
    const std::string given = text(name, std::to_string(otherwise));
    int64_t value = 0;
    const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
    if (error != std::errc() || end != given.data() + given.size() || value < lowest) {
      throw UsageError(fmt::format("--{} must be a whole number from {} on, not '{}'", name, lowest, given));
    }
    return value;
  }
  [[nodiscard]] double positive(const std::string& name, double otherwise) {
    const std::string given = text(name, fmt::format("{}", otherwise));
    char* end = nullptr;
    const double value = std::strtod(given.c_str(), &end);
    if (end == given.c_str() || *end != '\0' || !(value > 0)) {
      throw UsageError(fmt::format("--{} must be a number above 0, not '{}'", name, given));
    }
    return value;
  }
  [[nodiscard]] bool flag(const std::string& name) {
    help_ += fmt::format("  --{}\n", name);
    for (size_t i = 0; i < words_.size(); ++i) {
      if (words_[i] == "--" + name && taken_.insert(i).second) return true;
    }
    return false;
  }
  /// After all of them have been asked for.
  void finish() const {
    for (size_t i = 0; i < words_.size(); ++i) {
      if (!taken_.contains(i))
        throw UsageError(fmt::format("unknown or repeated argument '{}'; known are\n{}", words_[i], help_));
    }
  }

 private:
  std::vector<std::string> words_;
  std::set<size_t> taken_;
  std::string help_;
};

}  // namespace lockstep::examples
