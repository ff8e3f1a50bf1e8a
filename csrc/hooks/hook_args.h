// The arguments of a comm hook: values by name, checked against what the hook declares.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

/// One argument. An integer is taken where a fractional number is declared, nothing else is converted.
using HookValue = std::variant<bool, int64_t, double, std::string>;

/// What a hook takes: the default shows the type.
struct HookParam {
  std::string_view name;
  HookValue fallback;
  std::string_view meaning;  ///< Half a sentence, with the range.
};

/// Arguments by name. Compares and prints in the order of names, so the same on every rank.
class HookArgs {
 public:
  HookArgs() = default;
  HookArgs(std::initializer_list<std::pair<std::string, HookValue>> values) : values_(values.begin(), values.end()) {}

  void set(std::string name, HookValue value) { values_.insert_or_assign(std::move(name), std::move(value)); }
  [[nodiscard]] const std::map<std::string, HookValue>& values() const { return values_; }

  /// These arguments with the defaults of all others.
  /// @throws lockstep::Error  a name that `hook` does not declare, or a value of another type; names the right ones.
  [[nodiscard]] HookArgs completed(std::string_view hook, std::span<const HookParam> params) const;

  // For factories, which get completed arguments: reading another type than the declared one is a bug.
  [[nodiscard]] bool flag(const std::string& name) const { return std::get<bool>(values_.at(name)); }
  [[nodiscard]] double number(const std::string& name) const { return std::get<double>(values_.at(name)); }
  [[nodiscard]] int64_t integer(const std::string& name) const { return std::get<int64_t>(values_.at(name)); }
  [[nodiscard]] const std::string& text(const std::string& name) const {
    return std::get<std::string>(values_.at(name));
  }

  /// The same, from `lowest` to `highest`.
  /// @throws lockstep::Error  it lies outside.
  [[nodiscard]] int64_t integer(const std::string& name, int64_t lowest, int64_t highest) const;
  /// @throws lockstep::Error  negative, or not finite.
  [[nodiscard]] double at_least_zero(const std::string& name) const;
  /// @throws lockstep::Error  it is none of `choices`.
  [[nodiscard]] const std::string& one_of(const std::string& name, std::span<const std::string_view> choices) const;

  /// "power_sgd(epsilon=0, rank=2, ...)": equal exactly when hook and arguments are.
  [[nodiscard]] std::string signature(std::string_view hook) const;

 private:
  std::map<std::string, HookValue> values_;
};

}  // namespace lockstep
