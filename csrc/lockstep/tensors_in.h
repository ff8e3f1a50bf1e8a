// Finds the tensors in whatever a forward returns.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

/// A class of your own whose tensors are found by a function beside it, in its namespace:
///
///     struct Detections { at::Tensor boxes, scores; };
///     auto lockstep_tensors(const Detections& d) { return std::tie(d.boxes, d.scores); }
///
/// It returns anything in which tensors are found: a tensor, a tuple, a vector, another such class.
template <typename T>
concept ExplainsItsTensors = requires(const T& value) {
  lockstep_tensors(value);
};

namespace detail {

template <typename T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <typename T>
concept OptionalLike = requires(const T& value) {
  value.has_value();
  *value;
};
/// torch::OrderedDict's items.
template <typename T>
concept ItemLike = requires(const T& item) {
  item.key();
  item.value();
};
template <typename T>
concept HoldsNone = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_convertible_v<T, std::string_view> ||
    std::is_same_v<T, std::monostate> || std::is_same_v<T, std::nullopt_t>;

template <typename T>
inline constexpr bool kNotUnderstood = false;

/// @tparam Strict  a class in which nothing can be found is a compile-time error; else it counts as one without
/// tensors.
template <bool Strict, typename T>
void collect(const T& value, std::vector<at::Tensor>& found) {
  if constexpr (ExplainsItsTensors<T>) {
    collect<Strict>(lockstep_tensors(value), found);
  } else if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    found.push_back(value);
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    value.visit([&found](const c10::IValue& part) {
      if (part.isTensor()) found.push_back(part.toTensor());
      return false;  // go on, into containers and objects too
    });
  } else if constexpr (HoldsNone<T>) {
  } else if constexpr (TupleLike<T>) {
    std::apply([&](const auto&... parts) { (collect<Strict>(parts, found), ...); }, value);
  } else if constexpr (std::ranges::input_range<const T>) {
    for (const auto& part : value) collect<Strict>(part, found);
  } else if constexpr (ItemLike<T>) {
    collect<Strict>(value.value(), found);
  } else if constexpr (OptionalLike<T>) {
    if (value.has_value()) collect<Strict>(*value, found);
  } else {
    static_assert(!Strict || kNotUnderstood<T>,
                  "lockstep finds no tensors in this type, which forward returns: define lockstep_tensors(const T&) "
                  "beside it (see lockstep/tensors_in.h)");
  }
}

}  // namespace detail

/// The tensors in `value`, defined or not, in order: a tensor; what holds them in tuples, pairs, arrays, vectors, other
/// ranges, optionals and the values of maps, nested as they like; an IValue; or a class that explains itself
/// (`ExplainsItsTensors`). Anything else does not compile.
template <typename T>
[[nodiscard]] std::vector<at::Tensor> tensors_in(const T& value) {
  std::vector<at::Tensor> found;
  detail::collect<true>(value, found);
  return found;
}

}  // namespace lockstep
