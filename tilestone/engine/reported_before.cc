#include "tilestone/engine/reported_before_internal.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/base/error.h"
#include "tilestone/geometry/box.h"
#include "tilestone/geometry/dims.h"

namespace tilestone::engine {
namespace {

// What a rank writes under one key.
struct WrittenBefore {
  bool is_object = false;
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<Box> boxes;  // sorted

  friend bool operator==(const WrittenBefore&, const WrittenBefore&) = default;
};
using WrittenByKey = std::map<std::string_view, WrittenBefore>;

// `tensors`: the tensors of a plan or of a report. `chunks`: the chunks of these tensors that are
// written.
template <typename Tensors, typename Chunks>
void add_chunks(const Tensors& tensors, const Chunks& chunks, WrittenByKey& written) {
  for (const auto& chunk : chunks) {
    const auto& tensor = tensors.at(chunk.tensor);
    WrittenBefore& one = written[tensor.key];
    one.dtype = tensor.dtype;
    one.shape = tensor.global_shape;
    one.boxes.push_back(chunk.box);
  }
  for (auto& [key, one] : written) std::sort(one.boxes.begin(), one.boxes.end());
}

WrittenByKey written_of(const RankReport& report) {
  WrittenByKey written;
  add_chunks(report.tensors, report.chunks, written);
  for (const RankReport::Object& object : report.objects) written[object.key].is_object = true;
  return written;
}

WrittenByKey written_of(const LocalSavePlan& plan, const Assignment& mine) {
  std::vector<PlanChunk> chunks;
  for (const uint32_t i : mine.chunks) chunks.push_back(plan.chunks.at(i));
  WrittenByKey written;
  add_chunks(plan.tensors, chunks, written);
  for (const uint32_t i : mine.objects) written[plan.objects.at(i).key].is_object = true;
  return written;
}

std::string text_of(const WrittenByKey& written, std::string_view key) {
  const auto found = written.find(key);
  if (found == written.end()) return "nothing";
  const WrittenBefore& one = found->second;
  if (one.is_object) return "an object";
  std::string text = std::string(to_string(one.dtype)) + " of shape " + to_string(one.shape);
  if (!one.boxes.empty()) text += ", box " + to_string(one.boxes.front());
  if (one.boxes.size() > 1) text += " and " + std::to_string(one.boxes.size() - 1) + " more";
  return text;
}

}  // namespace

void expect_reported_state(const RankReport& report, const LocalSavePlan& plan,
                           const Assignment& mine) {
  const WrittenByKey before = written_of(report);
  const WrittenByKey now = written_of(plan, mine);
  const auto refuse = [&](std::string_view key) {
    throw Error(ErrorCode::kMismatch,
                "this rank saved another state under this token and number before: " +
                    text_of(before, key) + " then, but " + text_of(now, key) + " now")
        .with_key(std::string(key))
        .with_rank(report.rank)
        .with_hint("use another number to save another state");
  };
  for (const auto& [key, one] : before) {
    const auto found = now.find(key);
    if (found == now.end() || found->second != one) refuse(key);
  }
  for (const auto& [key, one] : now) {
    if (!before.contains(key)) refuse(key);
  }
}

}  // namespace tilestone::engine
