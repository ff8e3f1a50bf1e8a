// The sentences of the reducer's errors, kept together so that they stay alike. Key phrases are torch's, because
// scripts match on them.
#pragma once

#include <string>
#include <vector>

#include "buckets/grad_buffers.h"
#include "core/ids.h"
#include "reducer/options.h"

namespace lockstep::messages {

/// A new forward began while gradients of the last one are missing.
/// @param reasons  why, parameter by parameter.
[[nodiscard]] std::string unfinished(int rank, const ParamList& params, const std::vector<ParamId>& missing,
                                     GraphKind graph, const std::string& reasons);

/// A backward has ended with gradients missing, and no other one can bring them all.
[[nodiscard]] std::string local_gradients(const ParamList& params, const std::vector<ParamId>& missing,
                                          size_t buckets_left, size_t buckets, const std::string& reasons);

/// A hint about unused parameters was wrong.
[[nodiscard]] std::string bad_hint(const ParamList& params, ParamId id);

/// The first names, as many as a person reads.
[[nodiscard]] std::string names(const ParamList& params, const std::vector<ParamId>& ids);

/// A parameter reported its gradient more often than announced.
[[nodiscard]] std::string ready_twice(const ParamList& params, ParamId id, GraphKind graph);

/// "bucket 2 of 5 ('a.weight' (#3) ... 'b.bias' (#7))".
[[nodiscard]] std::string bucket(const BucketPlan& plan, BucketId id, const ParamList& params);

}  // namespace lockstep::messages
