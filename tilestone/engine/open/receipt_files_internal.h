// The small files through which the ranks of a save in the background meet. This header declares
// their names and contents; engine/commit/receipts.cc describes the protocol.
//
//   .tilestone/SAVE_ID.receipt-RANK   what the rank has written, or its error
//   .tilestone/SAVE_ID.ended          the outcome: published, or the error of all ranks
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"

namespace tilestone::engine {

std::string receipt_name(std::string_view save_id, int rank);
std::string ended_name(std::string_view save_id);
// Whether a name of `.tilestone` is one of the two; `base`: the name after SAVE_ID.
bool is_receipt_suffix(std::string_view base);

// The content of both files.
struct BackgroundReceipt {
  std::optional<Error> error;  // nullopt: the rank has written, or the checkpoint is published
  Bytes receipt = {};          // Receipt::encode(); empty in an outcome
  // In an outcome with an error: it came while the checkpoint was published, which may exist.
  bool may_exist = false;

  Bytes encode() const;
  // Error(kCorrupt) for other bytes. An empty file is from a rank that could not say why it failed.
  static BackgroundReceipt decode(ByteView bytes, const std::string& file);
};

}  // namespace tilestone::engine
