#include "tilestone/engine/run/terms_internal.h"

#include <algorithm>
#include <map>
#include <optional>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"

namespace tilestone::engine {
namespace {

std::string in_quotes(std::string_view text) { return "\"" + std::string(text) + "\""; }
std::string bool_text(bool value) { return value ? "True" : "False"; }

Bytes encode(const Terms& terms) {
  ByteWriter writer;
  for (const auto& [name, value] : terms) {
    writer.string(name);
    writer.string(value);
  }
  return std::move(writer).take();
}

Terms decode_terms(ByteView bytes, size_t rank) {
  ByteReader reader(bytes, "terms of rank " + std::to_string(rank));
  Terms terms;
  while (reader.remaining() > 0) {
    std::string name(reader.string());
    terms.emplace_back(std::move(name), std::string(reader.string()));
  }
  return terms;
}

// Cuts the terms off the message and returns their bytes. Their size follows them, as a u64.
Bytes take(Bytes& message, size_t rank) {
  const std::string what = "first message of rank " + std::to_string(rank);
  const size_t at = message.size() - std::min(message.size(), sizeof(uint64_t));
  const uint64_t size = ByteReader(ByteView(message).subspan(at), what).u64();
  if (size > at) throw Error(ErrorCode::kCorrupt, what + " does not hold its terms");
  const ByteView terms = ByteView(message).subspan(at - size, size);
  Bytes taken(terms.begin(), terms.end());
  message.resize(at - size);
  return taken;
}

[[noreturn]] void fail_differing(const std::vector<Terms>& all) {
  for (size_t t = 0; t < all.front().size(); ++t) {
    std::map<std::string, std::vector<int>> ranks;  // by value
    int first_other = -1;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      const bool same_name = t < all[rank].size() && all[rank][t].first == all.front()[t].first;
      const std::string value = same_name ? all[rank][t].second : "something else";
      if (value != all.front()[t].second && first_other < 0) first_other = static_cast<int>(rank);
      ranks[value].push_back(static_cast<int>(rank));
    }
    if (ranks.size() == 1) continue;
    std::string who = ranks_text(ranks[all.front()[t].second]) + ": " + all.front()[t].second;
    for (const auto& [value, with_it] : ranks) {
      if (value != all.front()[t].second) who += "; " + ranks_text(with_it) + ": " + value;
    }
    throw Error(ErrorCode::kMismatch,
                "the ranks don't agree on " + all.front()[t].first + " (" + who + ")")
        .with_rank(first_other)
        .with_reason(Reason::kDifferentArguments)
        .with_hint(Hint{{"every rank passes the same ", all.front()[t].first}});
  }
  throw Error(ErrorCode::kMismatch, "the ranks made different calls")
      .with_reason(Reason::kDifferentCalls);
}

}  // namespace

std::string attributes_text(const std::map<std::string, std::string>& attributes) {
  constexpr size_t kShort = 200;
  std::string text;
  for (const auto& [name, value] : attributes) {
    text += (text.empty() ? "" : ", ") + in_quotes(name) + ": " + in_quotes(value);
  }
  if (text.size() <= kShort) return "{" + text + "}";
  return std::to_string(attributes.size()) + " of XXH3 " + std::to_string(xxh3_64(as_bytes(text)));
}

std::string differing_text(Checks::Differing differing) {
  static constexpr std::string_view kDiffering[] = {"ignore", "warn", "error"};
  return in_quotes(kDiffering[static_cast<size_t>(differing)]);
}

std::string ranks_text(const std::vector<int>& ranks, size_t most) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  const size_t named = std::min(ranks.size(), most);
  for (size_t i = 0; i < named; ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  const size_t rest = ranks.size() - named;
  return rest == 0 ? text : text + " and " + std::to_string(rest) + " more";
}

Terms terms_of(const Location& location, const SaveOptions& options) {
  return {{"path", in_quotes(location.identity())},
          {"overwrite", bool_text(options.overwrite)},
          {"checks.access", bool_text(options.checks.access)},
          {"checks.common_differs", differing_text(options.checks.common_differs)},
          {"copies", options.copies ? "given" : "None"},
          {"tp_replica_names", bool_text(options.tp_replica_names)},
          {"verify_integrity", bool_text(options.verify_integrity)},
          {"format", in_quotes(format_of(options)->name())},
          {"dialect", in_quotes(dialect_of(options)->name())},
          {"attributes", attributes_text(options.attributes)}};
}

Terms terms_of(const Location& location, const LoadOptions& options) {
  static constexpr std::string_view kWays[] = {"auto", "always", "never"};
  static constexpr std::string_view kPolicies[] = {"error", "report", "ignore"};
  const auto policy = [](std::optional<Differences::Policy> named) {
    return named ? in_quotes(kPolicies[static_cast<size_t>(*named)]) : std::string("not set");
  };
  return {{"path", in_quotes(location.identity())},
          {"differences.not_in_checkpoint", policy(options.differences.not_in_checkpoint)},
          {"differences.not_requested", policy(options.differences.not_requested)},
          {"differences.other_shape", policy(options.differences.other_shape)},
          {"sharded_only", bool_text(options.sharded_only)},
          {"checks.access", bool_text(options.checks.access)},
          {"objects_by_grid", bool_text(options.objects_by_grid)},
          {"reading.two_phase", in_quotes(kWays[static_cast<size_t>(options.reading.two_phase)])},
          {"checks.checksums", bool_text(options.checks.checksums)},
          {"format", in_quotes(options.format ? options.format->name() : "found from the files")},
          {"unmarked", in_quotes(options.unmarked ? options.unmarked->name() : "pytorch")}};
}

Bytes with_terms(Bytes message, const Terms& terms) {
  const Bytes tail = encode(terms);
  ByteWriter size;
  size.u64(tail.size());
  const Bytes size_bytes = std::move(size).take();
  message.reserve(message.size() + tail.size() + size_bytes.size());
  message.insert(message.end(), tail.begin(), tail.end());
  message.insert(message.end(), size_bytes.begin(), size_bytes.end());
  return message;
}

void agree_on_terms(std::vector<Bytes>& messages) {
  std::vector<Bytes> terms;
  terms.reserve(messages.size());
  for (size_t rank = 0; rank < messages.size(); ++rank) terms.push_back(take(messages[rank], rank));
  const bool same = std::all_of(terms.begin(), terms.end(),
                                [&](const Bytes& other) { return other == terms.front(); });
  if (same) return;
  std::vector<Terms> all;
  for (size_t rank = 0; rank < terms.size(); ++rank) all.push_back(decode_terms(terms[rank], rank));
  fail_differing(all);
}

}  // namespace tilestone::engine
