#include "tilestone/comm/rendezvous_internal.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/comm/operation_internal.h"

namespace tilestone::comm_internal {

std::string Hello::name() const { return location.empty() ? work : work + " at " + location; }

bool same_call(const Hello& a, const Hello& b) {
  const bool locations_fit = a.location == b.location || a.location.empty() || b.location.empty();
  return a.work == b.work && locations_fit;
}

Bytes Hello::encode() const {
  ByteWriter writer;
  writer.u64(nonce);
  writer.u64(last_operation);
  writer.string(work);
  writer.string(location);
  return std::move(writer).take();
}

Hello Hello::decode(ByteView bytes) {
  ByteReader reader(bytes, "hello of a rank");
  Hello hello;
  hello.nonce = reader.u64();
  hello.last_operation = reader.u64();
  hello.work = reader.string();
  hello.location = reader.string();
  reader.expect_end();
  return hello;
}

// A rank that names no location matches every other rank, so all ranks are compared with one that
// names a location.
Fate decide(const std::vector<std::optional<Hello>>& hellos) {
  const Hello* measure = nullptr;
  size_t here = 0, away = 0;
  bool has_left = false;
  for (const std::optional<Hello>& hello : hellos) {
    if (!hello) continue;
    ++(hello->may_return ? away : here);
    if (hello->may_return) continue;
    has_left |= hello->left.has_value();
    if (measure == nullptr || measure->location.empty()) measure = &*hello;
  }
  const bool agree = std::all_of(hellos.begin(), hellos.end(), [&](const auto& hello) {
    return !hello || hello->may_return || same_call(*hello, *measure);
  });
  if (here == hellos.size()) return !agree ? Fate::kMismatch : has_left ? Fate::kLeft : Fate::kGo;
  return agree && here > 0 && here + away == hellos.size() ? Fate::kAway : Fate::kWait;
}

std::string who_is_where(const std::vector<std::optional<Hello>>& hellos) {
  std::map<std::string, std::vector<int>> calls;
  for (int rank = 0; rank < static_cast<int>(hellos.size()); ++rank) {
    if (hellos[rank] && !hellos[rank]->may_return) calls[hellos[rank]->name()].push_back(rank);
  }
  std::vector<std::pair<int, std::string>> parts;
  for (const auto& [name, ranks] : calls) {
    parts.emplace_back(ranks.front(), ranks_text(ranks, kNamedRanks) + ": " + name);
  }
  std::sort(parts.begin(), parts.end());
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : "; ") + part.second;
  return text;
}

Notice CallNotice::to(int rank) const {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(kind));
  writer.u64(nonce);
  writer.u64(number);
  writer.blob(hello ? hello->encode() : Bytes());
  writer.blob(error ? error->encode() : Bytes());
  return {rank, std::move(writer).take(), {}};
}

CallNotice CallNotice::from(const Notice& notice) {
  ByteReader reader(notice.bytes, "notice of a call");
  CallNotice said{static_cast<NoticeOf>(reader.u8()), reader.u64(), reader.u64()};
  if (const ByteView hello = reader.blob(); !hello.empty()) said.hello = Hello::decode(hello);
  if (const ByteView error = reader.blob(); !error.empty()) said.error = Error::decode(error);
  reader.expect_end();
  if (said.kind == NoticeOf::kWithdrawal)
    said.hello.value().left = said.error->with_rank(notice.rank);
  return said;
}

Deadline farewell_deadline() { return Deadline::after(std::chrono::seconds(1)); }

Error not_back(const Hello& own, const Hello& away, int rank) {
  return Error(away.left->code(),
               own.name() + ": rank " + std::to_string(rank) +
                   " left the call and did not come back: " + away.left->message())
      .with_rank(rank)
      .with_hint("repeat the call on every rank");
}

void abort_call(CallPort& port, const Error& why) {
  try {
    port.abort(why);
  } catch (...) {
    log(LogLevel::kWarning, std::string("could not send this rank's error to the other ranks: ") +
                                current_error().what());
  }
}

}  // namespace tilestone::comm_internal
