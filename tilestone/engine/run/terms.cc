#include "tilestone/engine/run/terms_internal.h"

#include <algorithm>
#include <map>
#include <optional>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/run/option_fields_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"

namespace tilestone::engine {
namespace {

std::string in_quotes(std::string_view text) { return "\"" + std::string(text) + "\""; }

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

// The values of options as Python's callers write them; `of` are the options.

std::string text_of(const auto& /*of*/, bool value) { return value ? "True" : "False"; }
template <HasWords Word>
std::string text_of(const auto& /*of*/, Word value) {
  return in_quotes(WordsOf<Word>::words[static_cast<size_t>(value)]);
}
template <HasWords Word>
std::string text_of(const auto& of, const std::optional<Word>& value) {
  return value ? text_of(of, *value) : "not set";
}
std::string text_of(const auto& /*of*/, const std::map<std::string, std::string>& attributes) {
  return attributes_text(attributes);
}
std::string text_of(const SaveOptions& of, const std::shared_ptr<const Format>& /*format*/) {
  return in_quotes(format_of(of)->name());
}
std::string text_of(const LoadOptions& /*of*/, const std::shared_ptr<const Format>& format) {
  return in_quotes(format ? format->name() : "found from the files");
}
std::string text_of(const auto& /*of*/, const std::shared_ptr<const Dialect>& dialect) {
  return in_quotes((dialect ? dialect : pytorch_dialect())->name());
}

constexpr int kOfSave = 1, kOfLoad = 2;

template <int call, typename Options>
void add_terms(const std::string& above, const Options& options, Terms& terms) {
  FieldsOf<Options>::each([&](const std::string& name, auto field, auto compared) {
    const auto& value = options.*field;
    if constexpr (HasFields<std::remove_cvref_t<decltype(value)>>) {
      add_terms<call>(name + ".", value, terms);
    } else if constexpr ((compared.value & call) != 0) {
      terms.emplace_back(above + name, text_of(options, value));
    }
  });
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

std::string differing_text(Checks::Differing differing) { return text_of(differing, differing); }

Terms terms_of(const Location& location, const SaveOptions& options) {
  Terms terms = {{"path", in_quotes(location.identity())}};
  add_terms<kOfSave>("", options, terms);
  terms.emplace_back("copies", options.copies ? "given" : "None");
  return terms;
}

Terms terms_of(const Location& location, const LoadOptions& options) {
  Terms terms = {{"path", in_quotes(location.identity())}};
  add_terms<kOfLoad>("", options, terms);
  return terms;
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
