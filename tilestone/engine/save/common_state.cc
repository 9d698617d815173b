#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/save/common_state_internal.h"
#include "tilestone/state/content_parts.h"

namespace tilestone::engine {
namespace {

constexpr size_t kMaxNamedPaths = 10;

std::vector<ContentPart> decode_parts(ByteView bytes) {
  ByteReader reader(bytes, "paths of a common state");
  std::vector<ContentPart> parts;
  for (uint64_t count = reader.count(10); count > 0; --count) {
    ContentPart& part = parts.emplace_back();
    part.path = reader.string();
    part.hash = reader.u64();
    part.text = reader.string();
  }
  reader.expect_end();
  return parts;
}

}  // namespace

std::vector<int> differing_ranks(const std::vector<PlanMessage>& messages) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (messages[rank].common != messages.front().common) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

Bytes encode_parts(const Value& common) {
  ByteWriter writer;
  const std::vector<ContentPart> parts = content_parts(common);
  writer.varint(parts.size());
  for (const ContentPart& part : parts) {
    writer.string(part.path);
    writer.u64(part.hash);
    writer.string(part.text);
  }
  return std::move(writer).take();
}

void tell_of_other_state(ByteView parts_of_0, ByteView parts_of_other,
                         const std::vector<int>& ranks, Checks::Differing common_differs) {
  const auto found = find_differences(decode_parts(parts_of_0), decode_parts(parts_of_other));
  const std::string other = "rank " + std::to_string(ranks.front());
  std::string text = "the common state of " + ranks_text(ranks) + " differs from that of rank 0: ";
  for (size_t i = 0; i < std::min(found.size(), kMaxNamedPaths); ++i) {
    text += (i == 0 ? "\"" : ", \"") + found[i].path + "\" (rank 0: " + found[i].a + "; " + other +
            ": " + found[i].b + ")";
  }
  if (found.size() > kMaxNamedPaths) {
    text += " and " + std::to_string(found.size() - kMaxNamedPaths) + " more";
  }
  if (found.empty()) text += "the difference has no path";
  if (common_differs == Checks::Differing::kError) {
    Error error(ErrorCode::kMismatch, text);
    if (!found.empty()) error.with_key(found.front().path);
    throw std::move(error).with_rank(ranks.front());
  }
  log(LogLevel::kWarning, text + "; the common state of rank 0 is saved");
}

}  // namespace tilestone::engine
