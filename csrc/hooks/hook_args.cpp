#include "hooks/hook_args.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace lockstep {
namespace {

std::string shown(const HookValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* text = std::get_if<std::string>(&value)) return fmt::format("'{}'", *text);
  if (const auto* number = std::get_if<double>(&value)) return fmt::format("{}", *number);
  return fmt::format("{}", std::get<int64_t>(value));
}

std::string_view type_of(const HookValue& value) {
  constexpr std::string_view kNames[] = {"bool", "int", "float", "str"};
  return kNames[value.index()];
}

std::string declaration(const HookParam& param) {
  return fmt::format("{}: {} = {} ({})", param.name, type_of(param.fallback), shown(param.fallback), param.meaning);
}

std::string declarations(std::span<const HookParam> params) {
  if (params.empty()) return "It takes no arguments";
  std::vector<std::string> lines;
  for (const HookParam& param : params) lines.push_back(declaration(param));
  return fmt::format("It takes {}", fmt::join(lines, "; "));
}

[[noreturn]] void refuse(const std::string& name, const HookValue& value, const std::string& expected) {
  fail(Code::kHookArgument, "a comm hook got {}={}, but {} must be {}. The hook has not been changed.", name,
       shown(value), name, expected);
}

}  // namespace

HookArgs HookArgs::completed(std::string_view hook, std::span<const HookParam> params) const {
  HookArgs all;
  for (const HookParam& param : params) all.set(std::string(param.name), param.fallback);
  for (const auto& [name, value] : values_) {
    const auto param = std::find_if(params.begin(), params.end(), [&](const HookParam& p) { return p.name == name; });
    if (param == params.end()) {
      fail(Code::kHookArgument, "the comm hook '{}' has no argument '{}'. {}.", hook, name, declarations(params));
    }
    const auto* integer = std::get_if<int64_t>(&value);
    if (integer != nullptr && std::holds_alternative<double>(param->fallback)) {
      all.set(name, static_cast<double>(*integer));
    } else if (value.index() == param->fallback.index()) {
      all.set(name, value);
    } else {
      fail(Code::kHookArgument, "the argument {} of the comm hook '{}' is {}, of type {}. It is declared as {}.", name,
           hook, shown(value), type_of(value), declaration(*param));
    }
  }
  return all;
}

int64_t HookArgs::integer(const std::string& name, int64_t lowest, int64_t highest) const {
  const int64_t value = integer(name);
  if (value < lowest || value > highest) refuse(name, value, fmt::format("from {} to {}", lowest, highest));
  return value;
}

double HookArgs::at_least_zero(const std::string& name) const {
  const double value = number(name);
  if (!std::isfinite(value) || value < 0) refuse(name, value, "finite and not negative");
  return value;
}

const std::string& HookArgs::one_of(const std::string& name, std::span<const std::string_view> choices) const {
  const std::string& value = text(name);
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    refuse(name, value, fmt::format("one of '{}'", fmt::join(choices, "', '")));
  }
  return value;
}

std::string HookArgs::signature(std::string_view hook) const {
  std::vector<std::string> parts;
  for (const auto& [name, value] : values_) parts.push_back(fmt::format("{}={}", name, shown(value)));
  return fmt::format("{}({})", hook, fmt::join(parts, ", "));
}

}  // namespace lockstep
