#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "tilestone/engine/fast_tier/host_reads_internal.h"
#include "tilestone/engine/run/rounds_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kMostOfTurn = 16u << 20;  // bytes to a rank and from a rank
constexpr uint64_t kPiece = 1u << 20;        // bytes of an answer
constexpr std::chrono::duration<double> kLongestPause{0.05};

// What a rank says in a turn.
constexpr uint8_t kNothing = 0, kAsks = 1, kEnded = 2;
// What an owner answers.
constexpr uint8_t kFailed = 0, kRead = 1, kLater = 2;

}  // namespace

void HostReads::get(std::span<const FarRange> ranges, const Deadline& deadline) {
  const auto batch = std::make_shared<Batch>();
  std::unique_lock lock(mutex_);
  for (const FarRange& range : ranges) {
    for (uint64_t done = 0; done < range.size; done += kPiece) {
      const uint64_t size = std::min(kPiece, range.size - done);
      waiting_.push_back(
          {{range.owner, range.file, range.offset + done, size, range.target + done}, batch});
      ++batch->left;
    }
  }
  changed_.notify_all();
  while (batch->left > 0 && !failure_) {
    changed_.wait_for(lock, deadline.wait_time());
    try {
      if (!deadline.expired()) continue;
      failure_ = Error(ErrorCode::kTimeout, "the deadline passed while another host was read");
    } catch (...) {
      failure_ = current_error();  // from now on nothing is put at the targets
      throw;
    }
  }
  if (batch->failure) throw Error(*batch->failure);
  if (failure_) throw Error(*failure_);
}

void HostReads::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void HostReads::fail(const Error& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
  waiting_.clear();
  changed_.notify_all();
}

// `pauses`: nobody has asked in the turn before.
HostReads::Turn HostReads::next_turn(int world, bool pauses) {
  Turn turn(static_cast<size_t>(world));
  std::unique_lock lock(mutex_);
  if (!pauses) pause_ = std::chrono::duration<double>(0.001);
  if (pauses) {
    changed_.wait_for(lock, pause_, [&] { return !waiting_.empty() || ended_; });
    pause_ = std::min(2 * pause_, kLongestPause);
  }
  for (uint64_t bytes = 0; !waiting_.empty() && bytes < kMostOfTurn; waiting_.pop_front()) {
    Piece& piece = waiting_.front();
    bytes += piece.range.size;
    turn[static_cast<size_t>(piece.range.owner)].push_back(std::move(piece));
  }
  return turn;
}

void HostReads::serve(const Communicator& comm, const std::string& save_id,
                      const std::function<Deadline()>& limit) {
  try {
    Rounds rounds(comm, "reading from other hosts", save_id, limit());
    try {
      take_turns(rounds, limit);
    } catch (...) {
      rounds.leave(current_error());
      throw;
    }
  } catch (...) {
    fail(current_error());
  }
}

void HostReads::take_turns(Rounds& rounds, const std::function<Deadline()>& limit) {
  for (bool pauses = false;;) {
    Turn turn = next_turn(rounds.comm().size(), pauses);
    const bool asks = std::ranges::any_of(turn, [](const auto& pieces) { return !pieces.empty(); });
    const std::vector<Bytes> asked = rounds.exchange("requests", limit(), [&] {
      bool ended = false;
      {
        const std::lock_guard lock(mutex_);
        ended = ended_ && waiting_.empty() && !asks;
      }
      std::vector<Bytes> messages;
      for (const auto& pieces : turn) {
        ByteWriter out;
        out.u8(asks ? kAsks : ended ? kEnded : kNothing);
        out.varint(pieces.size());
        for (const Piece& piece : pieces) {
          out.string(piece.range.file);
          out.varint(piece.range.offset);
          out.varint(piece.range.size);
        }
        messages.push_back(std::move(out).take());
      }
      return messages;
    });
    const auto has = [](uint8_t said) {
      return [said](const Bytes& message) {
        return !message.empty() && std::to_integer<uint8_t>(message[0]) == said;
      };
    };
    if (std::ranges::all_of(asked, has(kEnded))) return;
    pauses = std::ranges::none_of(asked, has(kAsks));
    if (pauses) continue;
    take(turn, rounds.exchange("bytes", limit(), [&] { return answers(asked); }));
  }
}

std::vector<Bytes> HostReads::answers(const std::vector<Bytes>& asked) const {
  std::vector<Bytes> messages;
  uint64_t sent = 0;
  for (const Bytes& message : asked) {
    ByteReader in(message, "a request to a host");
    in.u8();
    ByteWriter out;
    for (uint64_t left = in.count(3); left > 0; --left) {
      const std::string file(in.string());
      const uint64_t offset = in.varint();
      const uint64_t size = in.varint();
      try {
        if (size > kPiece) in.fail("a range is too long");
        if (sent >= kMostOfTurn) {
          out.u8(kLater);
          continue;
        }
        Bytes bytes(size);
        read_(file, offset, bytes);
        sent += size;
        out.u8(kRead);
        out.blob(bytes);
      } catch (const Error& error) {
        out.u8(kFailed);
        out.blob(error.encode());
      }
    }
    messages.push_back(std::move(out).take());
  }
  return messages;
}

void HostReads::take(Turn& turn, const std::vector<Bytes>& answers) {
  const std::lock_guard lock(mutex_);
  for (size_t owner = 0; owner < turn.size(); ++owner) {
    ByteReader in(answers[owner], "bytes of another host");
    for (Piece& piece : turn[owner]) {
      const uint8_t answer = in.u8();
      if (answer == kLater) {
        waiting_.push_back(std::move(piece));
        continue;
      }
      const ByteView bytes = in.blob();
      if (answer == kFailed) {
        Error failed = Error::decode(bytes);
        failed.with_rank(piece.range.owner);
        if (!piece.batch->failure) piece.batch->failure = std::move(failed);
      } else if (bytes.size() != piece.range.size) {
        in.fail("a range has another size");
      } else if (!failure_) {  // else the target may be gone
        std::memcpy(piece.range.target, bytes.data(), bytes.size());
      }
      --piece.batch->left;
    }
  }
  changed_.notify_all();
}

}  // namespace tilestone::engine
