// What an earlier checkpoint says of the items that a rank writes now (SaveOptions::reuse).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// A stored item, and its file: an index into EarlierStep::files().
struct EarlierItem {
  uint32_t file = 0;
  ReceiptItem at;  // with its blocks, if the payload has several
};

// The chunks in the receipts of an earlier checkpoint. A rank reads its own receipt; of a small
// manifest all of them, because another rank may have written what it writes now. It needs nobody
// for that. Any manifest will do: the data files were durable before it, and nobody changes them.
class EarlierStep {
 public:
  // nullopt, which is logged: nothing there can be read. Throws the interrupt's reason, kTimeout,
  // and kInvalidArgument for a path that is none.
  static std::optional<EarlierStep> read(const Location& location, int rank, Deadline deadline);
  EarlierStep(std::shared_ptr<Storage> storage, int rank, std::vector<Receipt> receipts);

  const std::vector<ReceiptFile>& files() const { return files_; }
  // The chunk of this tensor with this box. `copy`: what this rank wrote as a copy. nullopt: there
  // is none, or nothing says what its bytes are without reading all of them.
  std::optional<EarlierItem> find(std::string_view key, DType dtype, const Dims& global_shape,
                                  const Box& box, bool copy) const;
  // Storage::link() of the file, if it has its size.
  bool link(uint32_t file, Storage& to, const std::string& name, const Deadline& deadline) const;

 private:
  struct Chunk {
    const Receipt* receipt = nullptr;
    const Receipt::Chunk* chunk = nullptr;
    uint32_t first_file = 0;  // of the receipt, in files_
  };
  using ByKey = std::unordered_map<std::string_view, std::vector<Chunk>>;
  static const Chunk* find(const ByKey& chunks, std::string_view key, const Box& box);

  std::shared_ptr<Storage> storage_;
  std::vector<std::unique_ptr<const Receipt>> receipts_;
  std::vector<ReceiptFile> files_;
  ByKey chunks_;  // this rank's first
  ByKey copies_;  // this rank's
};

}  // namespace tilestone::engine
