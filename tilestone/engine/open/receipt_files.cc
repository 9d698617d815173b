#include "tilestone/engine/open/receipt_files_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/engine/open/cleanup_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint8_t kReceiptVersion = 1;
constexpr std::string_view kReceiptPart = ".receipt-";
constexpr std::string_view kEndedPart = ".ended";

enum class Status : uint8_t { kWell, kFailed, kUnknown };

}  // namespace

std::string receipt_name(std::string_view save_id, int rank) {
  std::string name(kTilestoneDirectory);
  return name.append("/").append(save_id).append(kReceiptPart).append(std::to_string(rank));
}

std::string ended_name(std::string_view save_id) {
  std::string name(kTilestoneDirectory);
  return name.append("/").append(save_id).append(kEndedPart);
}

bool is_receipt_suffix(std::string_view base) {
  if (base == kEndedPart) return true;
  if (!base.starts_with(kReceiptPart)) return false;
  const std::string_view rank = base.substr(kReceiptPart.size());
  return !rank.empty() &&
         std::all_of(rank.begin(), rank.end(), [](char c) { return c >= '0' && c <= '9'; });
}

Bytes BackgroundReceipt::encode() const {
  ByteWriter out;
  out.u8(kReceiptVersion);
  out.u8(static_cast<uint8_t>(!error      ? Status::kWell
                              : may_exist ? Status::kUnknown
                                          : Status::kFailed));
  out.blob(error ? Bytes(error->encode()) : receipt);
  const uint64_t sum = xxh3_64(out.bytes());
  out.u64(sum);
  return std::move(out).take();
}

BackgroundReceipt BackgroundReceipt::decode(ByteView bytes, const std::string& file) {
  if (bytes.empty()) {
    return {Error(ErrorCode::kIo, "a rank could not write, and could not say why")
                .with_hint("its disk may be full; its log says more")};
  }
  try {
    ByteReader in(bytes, file);
    if (in.u8() != kReceiptVersion) {
      throw Error(ErrorCode::kUnsupported, file + " was written by a newer version of Tilestone");
    }
    BackgroundReceipt left;
    const auto status = static_cast<Status>(in.u8());
    if (status > Status::kUnknown) in.fail("an unknown status");
    const ByteView content = in.blob();
    const uint64_t sum = xxh3_64(bytes.first(bytes.size() - in.remaining()));
    if (in.u64() != sum) in.fail("the checksum differs");
    in.expect_end();
    if (status != Status::kWell) {
      left.error = Error::decode(content);
      left.may_exist = status == Status::kUnknown;
    } else {
      left.receipt.assign(content.begin(), content.end());
    }
    return left;
  } catch (Error& error) {
    error.with_file(file);
    throw;
  }
}

}  // namespace tilestone::engine
