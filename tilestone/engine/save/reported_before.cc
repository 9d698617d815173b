#include "tilestone/engine/save/reported_before_internal.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/plan/texts_internal.h"
#include "tilestone/state/content_hash.h"

namespace tilestone::engine {
namespace {

[[noreturn]] void fail_other_state(int rank, std::string_view key, const std::string& what) {
  throw Error(ErrorCode::kMismatch,
              "this rank saved another state under this token and number before: " + what)
      .with_key(std::string(key))
      .with_rank(rank)
      .with_hint("use another number to save another state");
}

class Comparison {
 public:
  Comparison(const Receipt& receipt, const AttemptReceipt* left, const SaveShare& share)
      : receipt_(receipt), left_(left), share_(share), plan_(share.local) {
    for (const PlanTensor& tensor : plan_.tensors) tensors_.emplace(tensor.key, &tensor);
    for (const PlanObject& object : plan_.objects) objects_.emplace(object.key, &object);
    for (const Receipt::Tensor& tensor : receipt.tensors) before_.emplace(tensor.key, &tensor);
    for (const Receipt::Object& object : receipt.objects) written_.insert(object.key);
  }

  void expect_same() const {
    expect_reported_keys();
    expect_planned_keys();
    if (left_ != nullptr) expect_held();
    expect_written();
    expect_objects();
    expect_elements();
    if (receipt_.state == 0 || receipt_.state == state_of(share_)) return;
    fail("", "other values or tensors that another rank writes");
  }

 private:
  [[noreturn]] void fail(std::string_view key, const std::string& what) const {
    fail_other_state(receipt_.rank, key, what);
  }
  [[noreturn]] void fail(std::string_view key, const std::string& then,
                         const std::string& now) const {
    fail(key, then + " then, but " + now + " now");
  }

  // Everything in the receipt, which has all that this rank wrote, is still there.
  void expect_reported_keys() const {
    for (const auto& [key, tensor] : before_) {
      const std::string then = described(tensor->dtype, tensor->global_shape);
      const auto now = tensors_.find(key);
      if (now == tensors_.end()) fail(key, then, objects_.contains(key) ? "an object" : "nothing");
      const PlanTensor& found = *now->second;
      if (found.dtype == tensor->dtype && found.global_shape == tensor->global_shape) continue;
      fail(key, then, described(found.dtype, found.global_shape));
    }
    for (const std::string_view key : written_) {
      if (objects_.contains(key)) continue;
      fail(key, "an object", tensors_.contains(key) ? "a tensor" : "nothing");
    }
  }

  // What this rank would write now and has not: the receipt of its own tensors has each key.
  void expect_planned_keys() const {
    if (left_ != nullptr) return;  // expect_held() knows more
    for (const uint32_t i : share_.assignment.chunks) {
      const PlanTensor& tensor = plan_.tensors[plan_.chunks[i].tensor];
      if (before_.contains(tensor.key)) continue;
      fail(tensor.key, "nothing", described(tensor.dtype, tensor.global_shape));
    }
  }

  // Compares what it holds, whoever writes it.
  void expect_held() const {
    std::set<uint64_t> then, now;
    for (const HeldContent& held : left_->held) then.insert(held.id);
    for (const PlanObject& object : plan_.objects) {
      now.insert(id_of(object.key));
      if (!then.contains(id_of(object.key))) fail(object.key, "nothing", "an object");
    }
    for (const PlanChunk& chunk : plan_.chunks) {
      if (chunk.box.empty()) continue;
      const PlanTensor& tensor = plan_.tensors[chunk.tensor];
      const uint64_t id = id_of(tensor, chunk.box);
      now.insert(id);
      if (then.contains(id)) continue;
      fail(tensor.key, "another tensor, or nothing",
           described(tensor.dtype, tensor.global_shape) + ", box " + to_string(chunk.box));
    }
    if (now.size() < then.size()) fail("", "a tensor or object that it does not have now");
    expect_contents();
  }

  void expect_contents() const {
    std::map<uint64_t, uint64_t> then;
    for (const HeldContent& held : left_->held) then.emplace(held.id, held.content);
    const auto compare = [&](uint64_t id, uint64_t content, const std::string& key,
                             const char* what) {
      const uint64_t before = then[id];
      if (before != 0 && content != 0 && before != content) fail(key, what);
    };
    for (const PlanObject& object : plan_.objects) {
      compare(id_of(object.key), object.content, object.key, "an object with another value");
    }
    for (const PlanChunk& chunk : plan_.chunks) {
      const PlanTensor& tensor = plan_.tensors[chunk.tensor];
      if (chunk.box.empty()) continue;
      compare(id_of(tensor, chunk.box), chunk.content, tensor.key, "other elements");
    }
  }

  // Its part must be the same: otherwise another rank's state was another one.
  void expect_written() const {
    for (const Receipt::Chunk& chunk : receipt_.chunks) {
      const std::string& key = receipt_.tensors[chunk.tensor].key;
      if (!chunk.box.empty() && !piece_of(key, chunk.box)) {
        fail(key, "box " + to_string(chunk.box), "other boxes");
      }
    }
    const auto has_elements = [](const auto& chunk) { return !chunk.box.empty(); };
    const auto then = std::count_if(receipt_.chunks.begin(), receipt_.chunks.end(), has_elements);
    const auto now = std::count_if(share_.assignment.chunks.begin(), share_.assignment.chunks.end(),
                                   [&](uint32_t i) { return !plan_.chunks[i].box.empty(); });
    if (then != now) {
      fail("", std::to_string(then) + " boxes", std::to_string(now));
    }
  }

  void expect_objects() const {
    for (const Receipt::Object& object : receipt_.objects) {
      const uint64_t now = objects_.at(object.key)->content;
      if (object.content == 0 || now == 0 || object.content == now) continue;
      fail(object.key, "an object with another value");
    }
  }

  // Reads all elements that the rank has written.
  void expect_elements() const {
    for (const auto* chunks : {&receipt_.chunks, &receipt_.copies}) {
      for (const Receipt::Chunk& chunk : *chunks) {
        const std::string& key = receipt_.tensors[chunk.tensor].key;
        const Piece* const piece = piece_of(key, chunk.box);
        if (piece == nullptr || chunk.box.empty()) continue;
        uint32_t crc = 0;
        for_each_block(piece->data, [&](ByteView block) { crc = crc32(block, crc); });
        if (crc != chunk.at.checksums.payload_crc32) fail(key, "other elements");
      }
    }
  }

  const Piece* piece_of(std::string_view key, const Box& box) const {
    if (pieces_.empty()) {
      for (const TensorItem& item : share_.items.tensors) {
        for (const Piece& piece : item.pieces) pieces_[item.key].push_back(&piece);
      }
    }
    const auto found = pieces_.find(key);
    if (found == pieces_.end()) return nullptr;
    for (const Piece* piece : found->second) {
      if (piece->box == box) return piece;
    }
    return nullptr;
  }

  const Receipt& receipt_;
  const AttemptReceipt* const left_;
  const SaveShare& share_;
  const LocalSavePlan& plan_;
  std::map<std::string_view, const PlanTensor*> tensors_;
  std::map<std::string_view, const PlanObject*> objects_;
  std::map<std::string_view, const Receipt::Tensor*> before_;
  std::set<std::string_view> written_;  // objects
  mutable std::map<std::string_view, std::vector<const Piece*>> pieces_;
};

}  // namespace

uint64_t state_of(const SaveShare& share) {
  ByteWriter out;
  for (const HeldContent& held : held_contents(share.local)) {
    out.u64(held.id);
    out.u64(held.content);
  }
  return std::max<uint64_t>(xxh3_64(out.bytes()), 1);
}

void expect_reported_state(const Receipt& receipt, const AttemptReceipt* left,
                           const SaveShare& share) {
  Comparison(receipt, left, share).expect_same();
}

void expect_same_receipt(const Receipt& counted, const Receipt& own) {
  std::map<std::pair<std::string_view, Box>, uint32_t> written;
  for (const Receipt::Chunk& chunk : counted.chunks) {
    written.emplace(std::pair(std::string_view(counted.tensors[chunk.tensor].key), chunk.box),
                    chunk.at.checksums.payload_crc32);
  }
  for (const Receipt::Chunk& chunk : own.chunks) {
    const std::string& key = own.tensors[chunk.tensor].key;
    const auto found = written.find(std::pair(std::string_view(key), chunk.box));
    if (found == written.end()) fail_other_state(own.rank, key, "other boxes");
    if (found->second != chunk.at.checksums.payload_crc32) {
      fail_other_state(own.rank, key, "other elements");
    }
  }
  if (counted.chunks.size() != own.chunks.size()) {
    fail_other_state(own.rank, "", "tensors that it does not have now");
  }
  if (counted.state != 0 && own.state != 0 && counted.state != own.state) {
    fail_other_state(own.rank, "", "other values or tensors");
  }
}

}  // namespace tilestone::engine
