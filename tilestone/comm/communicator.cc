// all_gather and barrier are a gather to rank 0 and a broadcast from it. Only rank 0 knows which
// rank is missing. So the gather gets nine tenths of the time, and rank 0 uses the last tenth to
// tell the others: the broadcast carries either the bytes of all ranks or rank 0's error, and every
// rank throws the same error. Each rank makes both operations in any case, so that the group stays
// in step.
#include "tilestone/comm/communicator.h"

#include <optional>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

constexpr double kGatherShare = 0.9;  // of the time until the deadline
enum class Verdict : uint8_t { kComplete = 0, kFailed = 1 };

Bytes encode_parts(const std::vector<Bytes>& parts) {
  size_t total = 1;
  for (const Bytes& part : parts) total += part.size() + 10;
  ByteWriter writer;
  writer.reserve(total);
  writer.u8(static_cast<uint8_t>(Verdict::kComplete));
  for (const Bytes& part : parts) writer.blob(part);
  return std::move(writer).take();
}

Bytes encode_failure(const Error& error) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(Verdict::kFailed));
  writer.blob(error.encode());
  return std::move(writer).take();
}

std::vector<Bytes> decode_parts(ByteView bytes, int size) {
  ByteReader reader(bytes, "verdict of an all_gather");
  if (reader.u8() == static_cast<uint8_t>(Verdict::kFailed)) throw Error::decode(reader.blob());
  std::vector<Bytes> parts;
  parts.reserve(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    const ByteView part = reader.blob();
    parts.emplace_back(part.begin(), part.end());
  }
  reader.expect_end();
  return parts;
}

}  // namespace

Communicator::Communicator() : Communicator(solo()) {}

std::vector<Bytes> Communicator::all_gather(ByteView mine, Deadline deadline) const {
  if (size() == 1) return gather(mine, 0, deadline);
  std::optional<Error> failure;
  std::vector<Bytes> parts;
  try {
    parts = gather(mine, 0, deadline.sooner(kGatherShare));
  } catch (...) {
    failure = current_error();
  }
  Bytes verdict;
  if (is_coordinator()) verdict = failure ? encode_failure(*failure) : encode_parts(parts);
  try {
    verdict = broadcast(verdict, 0, deadline);
  } catch (...) {
    if (failure) throw *failure;  // the first error caused the second
    throw;
  }
  if (failure) throw *failure;
  if (is_coordinator()) return parts;
  return decode_parts(verdict, size());
}

void Communicator::barrier(Deadline deadline) const { all_gather({}, deadline); }

}  // namespace tilestone
