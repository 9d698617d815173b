// Reading files of other hosts, while all ranks restore or make copies: whoever lacks bytes asks
// the rank that has them.
//
// Each rank serves in a thread, with a communicator that nothing else uses. All ranks take the same
// turns until none needs anything more: an exchange of requests, and if any rank has asked, one of
// the bytes. A rank without requests waits a little before each turn, longer and longer up to 50
// ms, so that idle turns cost little. A turn moves at most 16 MiB to each rank and from each rank.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/fast_tier/copying_internal.h"
#include "tilestone/engine/run/rounds_internal.h"

namespace tilestone::engine {

// A range of a file of another host.
struct FarRange {
  int owner = 0;  // the rank that reads it
  std::string file;
  uint64_t offset = 0;  // bytes
  uint64_t size = 0;    // bytes
  std::byte* target = nullptr;
};

// Thread-safe.
class HostReads {
 public:
  // `read`: reads a file of this host.
  explicit HostReads(ReadRange read) : read_(std::move(read)) {}

  // Takes the turns, until end() was called on every rank. Every rank, in its thread. `limit`: by
  // when the ranks must have taken one turn, from its beginning.
  void serve(const Communicator& comm, const std::string& save_id,
             const std::function<Deadline()>& limit);
  // Returns when all ranges are at their targets. Throws what the owner's read has thrown, with its
  // rank, or why serve() has ended.
  void get(std::span<const FarRange> ranges, const Deadline& deadline);
  void end();  // this rank needs nothing more

 private:
  // All ranges of one get().
  struct Batch {
    uint64_t left = 0;  // pieces
    std::optional<Error> failure;
  };
  // What one turn brings: part of a range.
  struct Piece {
    FarRange range;
    std::shared_ptr<Batch> batch;
  };
  using Turn = std::vector<std::vector<Piece>>;  // by owner

  void take_turns(Rounds& rounds, const std::function<Deadline()>& limit);
  Turn next_turn(int world, bool pauses);
  std::vector<Bytes> answers(const std::vector<Bytes>& asked) const;
  void take(Turn& turn, const std::vector<Bytes>& answers);
  void fail(const Error& error) noexcept;

  const ReadRange read_;
  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  std::deque<Piece> waiting_;
  std::optional<Error> failure_;  // of serve()
  bool ended_ = false;
  std::chrono::duration<double> pause_{0.001};
};

}  // namespace tilestone::engine
