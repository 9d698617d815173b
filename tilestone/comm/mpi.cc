// How an operation runs:
//
// 1. Every rank counts its operations. All ranks make the same operations in the same order, so an
//    operation has the same number on every rank. Each duplicate of a communicator begins with
//    another number. The number modulo the number of tags is the tag of the messages; the full
//    number is in their headers. A call (call.h) begins with a number that no rank has used.
// 2. All sends and receives of the operation are posted at once. They are polled (at first with
//    yields, later with sleeps) until all are complete or the deadline has passed. Nothing blocks
//    inside MPI.
// 3. After the deadline, the peers of the incomplete transfers are the missing ranks. MPI may still
//    access the memory of these transfers (a send can't be cancelled), so they are kept and polled
//    during later operations. A late message is received under its old tag and dropped, so a late
//    sender can complete its send. A tag is used again only after as many other operations as MPI
//    has tags, at most 2^30.
//
// In gather and scatter, rank 0 exchanges one message with each rank. In a broadcast, rank 0
// sends each rank one message directly, so a rank that has died cuts off no other rank from a short
// message (a verdict, an error). A long payload follows down a binomial tree.
#include "tilestone/comm/communicator.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/comm/mpi_internal.h"
#include "tilestone/comm/mpi_notices_internal.h"
#include "tilestone/comm/mpi_transfer_internal.h"
#include "tilestone/comm/operation_internal.h"

namespace tilestone {
namespace {

using comm_internal::MpiNotices;
using comm_internal::MpiReceive;
using comm_internal::MpiRoute;
using comm_internal::MpiSend;
using comm_internal::MpiTransfer;
using std::chrono::microseconds;

constexpr uint64_t kMaxTags = uint64_t{1} << 30;
constexpr uint64_t kOperationsOfGeneration = 1000003;
constexpr int kYieldingPolls = 100;
constexpr microseconds kShortestSleep{10};
constexpr microseconds kLongestSleep{500};

// The number of communicators with a missing rank that has sent nothing since.
std::atomic<int> communicators_with_missing_ranks{0};

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ErrorCode::kInternal, std::string(what) + ": " + text);
}

bool finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

// A communicator that is being duplicated.
struct Duplicate {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  bool is_complete() {
    int flag = 0;
    return MPI_Test(&request, &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && flag != 0;
  }
};
// The duplications that were given up at their deadline. MPI may still write to them.
class GivenUp {
 public:
  void add(std::unique_ptr<Duplicate> duplicate) {
    const std::lock_guard lock(mutex_);
    duplicates_.push_back(std::move(duplicate));
  }
  bool are_complete() {  // whether the missing ranks have joined all of them
    const std::lock_guard lock(mutex_);
    return std::all_of(duplicates_.begin(), duplicates_.end(),
                       [](const auto& duplicate) { return duplicate->is_complete(); });
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Duplicate>> duplicates_;
};
GivenUp& given_up() {
  static GivenUp* const list = new GivenUp;  // never destroyed
  return *list;
}

// Whether this process was forked after MPI was initialised. MPI's connections belong to the
// parent.
std::atomic<bool> forked_child{false};

// Installed when the library is loaded, because a program that initialises MPI itself may fork
// before it first uses this communicator.
[[maybe_unused]] const int noting_forks = ::pthread_atfork(nullptr, nullptr, [] {
  int initialized = 0;
  if (MPI_Initialized(&initialized) == MPI_SUCCESS && initialized != 0) forked_child = true;
});

void refuse_in_forked_child() {
  if (!forked_child) return;
  throw Error(
      ErrorCode::kUnsupported,
      "MPI was initialised before this process was forked; its connections belong to the parent")
      .with_hint("save and load in the parent process, or in this process alone with solo()");
}

void finalize_at_exit() {
  if (!forked_child && !finalized() && communicators_with_missing_ranks == 0 &&
      given_up().are_complete()) {
    MPI_Finalize();
  }
}

// Initialises MPI unless it is initialised already. Warns if the thread level is too low.
void initialize() {
  static std::mutex mutex;
  refuse_in_forked_child();
  std::lock_guard lock(mutex);
  int initialized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  if (finalized()) throw Error(ErrorCode::kUnsupported, "MPI has already been finalised");
  int provided = 0;
  if (initialized) {
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
  } else {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    std::atexit(finalize_at_exit);
  }
  if (provided < MPI_THREAD_MULTIPLE) {
    log_once(LogLevel::kWarning,
             "MPI was initialised without MPI_THREAD_MULTIPLE: while one thread saves or loads, "
             "no other may call MPI");
  }
}

// Waits between two polls. The waits get longer while the polls find nothing.
class Backoff {
 public:
  void reset() { *this = Backoff(); }
  void wait() {
    if (++polls_ < kYieldingPolls) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 2, kLongestSleep);
  }

 private:
  int polls_ = 0;
  microseconds sleep_ = kShortestSleep;
};

// The ranks that an operation missed and that have sent nothing since.
class MissingRanks {
 public:
  void add(const std::vector<int>& ranks) {
    const bool first = ranks_.empty();
    ranks_.insert(ranks.begin(), ranks.end());
    if (first && !ranks_.empty()) ++communicators_with_missing_ranks;
  }
  void heard_of(int rank) {
    if (ranks_.erase(rank) > 0 && ranks_.empty()) --communicators_with_missing_ranks;
  }

 private:
  std::set<int> ranks_;
};

// The state that the operations of one communicator share.
struct Channel {
  Channel(MPI_Comm original, size_t fragment_bytes, size_t tree_bytes, Deadline deadline);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void progress_abandoned();

  // MPI gives a new communicator the context of one that was freed, and with it messages that come
  // late. By this number the ranks know the messages of this one.
  uint64_t generation = 0;
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 0;
  uint64_t tags = kMaxTags;
  size_t fragment_bytes;
  size_t tree_bytes;
  uint64_t operation = 0;  // number of the last operation or call
  uint64_t call = 0;       // number of the current call; 0 outside of calls
  std::vector<std::unique_ptr<MpiTransfer>> abandoned;
  MissingRanks missing;
  MpiNotices notices;
};

// How many duplicates of the communicator were begun before. All ranks make the same ones, so the
// number is the same on all of them. A freed and remade communicator begins again.
uint64_t generation_of(MPI_Comm original) {
  static std::mutex mutex;
  static int key = MPI_KEYVAL_INVALID;
  const std::lock_guard lock(mutex);
  if (key == MPI_KEYVAL_INVALID) {
    check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &key, nullptr),
              "MPI_Comm_create_keyval");
  }
  void* before = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(original, key, &before, &found), "MPI_Comm_get_attr");
  const uint64_t generation = found ? reinterpret_cast<uintptr_t>(before) : 0;
  check_mpi(MPI_Comm_set_attr(original, key, reinterpret_cast<void*>(generation + 1)),
            "MPI_Comm_set_attr");
  return generation;
}

// Collective: waits until all ranks have called it. Error(kTimeout) after the deadline.
MPI_Comm duplicate(MPI_Comm original, Deadline deadline) {
  auto copy = std::make_unique<Duplicate>();
  check_mpi(MPI_Comm_idup(original, &copy->comm, &copy->request), "MPI_Comm_idup");
  Backoff backoff;
  while (!copy->is_complete()) {
    if (deadline.expired()) {
      given_up().add(std::move(copy));
      throw Error(ErrorCode::kTimeout,
                  "the deadline passed while duplicating an MPI communicator: not all of its ranks "
                  "made the same call");
    }
    backoff.wait();
  }
  return copy->comm;
}

Channel::Channel(MPI_Comm original, size_t fragment, size_t tree, Deadline deadline)
    : generation(generation_of(original)),
      comm(duplicate(original, deadline)),
      fragment_bytes(fragment),
      tree_bytes(tree),
      notices([this](int from) { missing.heard_of(from); }) {
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  void* upper_bound = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(comm, MPI_TAG_UB, &upper_bound, &found), "MPI_Comm_get_attr");
  if (found) tags = std::min(tags, static_cast<uint64_t>(*static_cast<int*>(upper_bound)));
  operation = generation * kOperationsOfGeneration;
  // Operations use the tags below.
  notices.open(comm, static_cast<int>(tags), rank, size, generation);
}

Channel::~Channel() {
  const bool inherited = forked_child;
  if (!inherited && !finalized()) progress_abandoned();
  if (inherited || finalized() || !abandoned.empty() || notices.is_busy()) {
    // MPI may access this memory until the process ends, so it is leaked.
    for (auto& transfer : abandoned) static_cast<void>(transfer.release());
    notices.release();
    return;
  }
  MPI_Comm_free(&comm);
}

void Channel::progress_abandoned() {
  try {
    notices.progress();
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, error.what());
  }
  std::erase_if(abandoned, [this](std::unique_ptr<MpiTransfer>& transfer) {
    try {
      if (!transfer->complete()) return false;
      missing.heard_of(transfer->peer());  // also after a send: it had to wait for the peer
      return true;
    } catch (const std::exception& error) {
      log(LogLevel::kWarning,
          std::string("could not complete a message after its operation failed: ") + error.what());
      static_cast<void>(transfer.release());  // leaked: MPI may still access its memory
      return true;
    }
  });
}

// The sends and receives of one operation of this rank. The destructor leaves incomplete transfers
// to the channel.
class Operation {
 public:
  Operation(Channel& channel, const char* name, Deadline deadline)
      : channel_(channel), name_(name), deadline_(deadline) {
    refuse_in_forked_child();
    ++channel_.operation;
    channel_.progress_abandoned();
  }
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void send(int to, std::shared_ptr<const Bytes> message) {
    post(std::make_unique<MpiSend>(route(to), std::move(message)));
  }
  void send(int to, Bytes message) { send(to, std::make_shared<const Bytes>(std::move(message))); }
  // Starts to receive a message. Take it after wait(); the pointer is valid as long as the
  // operation.
  MpiReceive* receive(int from) {
    auto transfer = std::make_unique<MpiReceive>(route(from));
    MpiReceive* receive = transfer.get();
    post(std::move(transfer));
    return receive;
  }
  // Waits until all sends and receives are complete. Error(kTimeout) after the deadline.
  void wait();

  Bytes receive_one(int from);
  // The messages of all ranks, by rank; `own` is this rank's element.
  std::vector<Bytes> receive_from_others(Bytes own);

 private:
  MpiRoute route(int peer) const {
    return {name_,
            channel_.comm,
            peer,
            static_cast<int>(channel_.operation % channel_.tags),
            channel_.operation,
            channel_.fragment_bytes};
  }
  void post(std::unique_ptr<MpiTransfer> transfer) {
    transfers_.push_back(std::move(transfer));
    pending_.push_back(transfers_.back().get());
    pending_.back()->start();
  }
  bool progress();  // returns whether a transfer was completed

  Channel& channel_;
  const char* name_;
  Deadline deadline_;
  std::vector<std::unique_ptr<MpiTransfer>> transfers_;
  std::vector<MpiTransfer*> pending_;
};

Operation::~Operation() {
  for (auto& transfer : transfers_) {
    const bool incomplete =
        std::find(pending_.begin(), pending_.end(), transfer.get()) != pending_.end();
    if (incomplete) channel_.abandoned.push_back(std::move(transfer));
  }
}

bool Operation::progress() {
  return std::erase_if(pending_, [this](MpiTransfer* transfer) {
           if (!transfer->complete()) return false;
           if (transfer->receives()) channel_.missing.heard_of(transfer->peer());
           return true;
         }) > 0;
}

void Operation::wait() {
  Backoff backoff;
  while (true) {
    try {
      if (progress()) backoff.reset();
    } catch (const Error& error) {
      channel_.missing.add({error.rank()});
      throw;
    }
    if (pending_.empty()) return;
    channel_.progress_abandoned();
    if (channel_.call != 0) channel_.notices.check(channel_.call);
    if (deadline_.expired()) break;
    backoff.wait();
  }
  std::set<int> peers;
  for (const MpiTransfer* transfer : pending_) peers.insert(transfer->peer());
  const std::vector<int> ranks(peers.begin(), peers.end());
  channel_.missing.add(ranks);
  throw comm_internal::timed_out(name_, ranks);
}

Bytes Operation::receive_one(int from) {
  MpiReceive* message = receive(from);
  wait();
  return message->take();
}

std::vector<Bytes> Operation::receive_from_others(Bytes own) {
  std::vector<MpiReceive*> receives(static_cast<size_t>(channel_.size), nullptr);
  for (int from = 0; from < channel_.size; ++from) {
    if (from != channel_.rank) receives[from] = receive(from);
  }
  wait();
  std::vector<Bytes> all;
  all.reserve(receives.size());
  for (MpiReceive* message : receives) {
    all.push_back(message == nullptr ? std::move(own) : message->take());
  }
  return all;
}

// The first byte of the first message of a broadcast, which goes to every rank: whether the payload
// is in this message or follows down the tree.
enum class Follows : uint8_t { kNothing = 0, kPayload = 1 };

Bytes opening(ByteView payload, bool tree) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(tree ? Follows::kPayload : Follows::kNothing));
  if (!tree) writer.raw(payload);
  return std::move(writer).take();
}

class Mpi final : public CommunicatorImpl, private CallPort {
 public:
  Mpi(MPI_Comm original, size_t fragment_bytes, size_t tree_bytes, Deadline deadline)
      : channel_(original, fragment_bytes, tree_bytes, deadline) {}

  int rank() const override { return channel_.rank; }
  int size() const override { return channel_.size; }
  std::string describe() const override { return "mpi"; }

  std::vector<Bytes> gather(ByteView mine, Deadline deadline) override;
  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) override;
  Bytes broadcast(ByteView mine, Deadline deadline) override;
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) override;

  CallPort* call_port() override { return this; }

 private:
  void post(std::vector<Notice> notices, Deadline) override {
    refuse_in_forked_child();
    channel_.notices.post(std::move(notices));
  }
  std::vector<Notice> newest(Deadline deadline, Deadline limit) override;
  uint64_t last_operation() const override {
    refuse_in_forked_child();  // a call asks for this number first
    return channel_.operation;
  }
  void enter(uint64_t call) override { channel_.operation = channel_.call = call; }
  void abort(const Error& why) override {
    if (channel_.call != 0 && !forked_child) channel_.notices.abort(channel_.call, why);
  }
  void leave() override { channel_.call = 0; }
  void missed(const std::vector<int>& ranks) override { channel_.missing.add(ranks); }
  CallMemory& memory() override { return memory_; }

  template <typename Visit>
  void for_each_other(Visit visit) const {
    for (int other = 0; other < size(); ++other) {
      if (other != rank()) visit(other);
    }
  }
  void send_down(Operation& operation, const std::shared_ptr<const Bytes>& payload);
  Bytes broadcast_from_0(Operation& operation, ByteView mine);
  Bytes receive_broadcast(Operation& operation);

  Channel channel_;
  CallMemory memory_;
};

std::vector<Notice> Mpi::newest(Deadline deadline, Deadline /*limit*/) {
  refuse_in_forked_child();
  Backoff backoff;
  while (true) {
    channel_.progress_abandoned();
    std::vector<Notice> notices = channel_.notices.take();
    if (!notices.empty() || deadline.expired()) return notices;
    backoff.wait();
  }
}

std::vector<Bytes> Mpi::gather(ByteView mine, Deadline deadline) {
  Operation operation(channel_, "gather", deadline);
  Bytes own(mine.begin(), mine.end());
  if (rank() == 0) return operation.receive_from_others(std::move(own));
  operation.send(0, std::move(own));
  operation.wait();
  return {};
}

Bytes Mpi::scatter(std::vector<Bytes> parts, Deadline deadline) {
  Operation operation(channel_, "scatter", deadline);
  if (rank() != 0) return operation.receive_one(0);
  comm_internal::check_parts("scatter", parts.size(), size());
  for_each_other([&](int to) { operation.send(to, std::move(parts[to])); });
  operation.wait();
  return std::move(parts[rank()]);
}

Bytes Mpi::broadcast(ByteView mine, Deadline deadline) {
  Operation operation(channel_, "broadcast", deadline);
  return rank() == 0 ? broadcast_from_0(operation, mine) : receive_broadcast(operation);
}

Bytes Mpi::broadcast_from_0(Operation& operation, ByteView mine) {
  const bool tree = mine.size() > channel_.tree_bytes;
  const auto first = std::make_shared<const Bytes>(opening(mine, tree));
  for_each_other([&](int to) { operation.send(to, first); });
  if (tree) send_down(operation, std::make_shared<const Bytes>(mine.begin(), mine.end()));
  operation.wait();
  return Bytes(mine.begin(), mine.end());
}

Bytes Mpi::receive_broadcast(Operation& operation) {
  const Bytes first = operation.receive_one(0);
  ByteReader reader(first, "opening of a broadcast");
  if (reader.u8() == static_cast<uint8_t>(Follows::kNothing)) {
    const ByteView payload = reader.raw(reader.remaining());
    return Bytes(payload.begin(), payload.end());
  }
  const int parent = comm_internal::tree_parent(rank());
  const auto payload = std::make_shared<const Bytes>(operation.receive_one(parent));
  send_down(operation, payload);
  operation.wait();
  return *payload;
}

void Mpi::send_down(Operation& operation, const std::shared_ptr<const Bytes>& payload) {
  for (int child : comm_internal::tree_children(rank(), size())) {
    operation.send(child, payload);
  }
}

std::vector<Bytes> Mpi::all_to_all(std::vector<Bytes> to, Deadline deadline) {
  Operation operation(channel_, "all_to_all", deadline);
  comm_internal::check_parts("all_to_all", to.size(), size());
  for_each_other([&](int peer) { operation.send(peer, std::move(to[peer])); });
  return operation.receive_from_others(std::move(to[rank()]));
}

}  // namespace

Communicator mpi_world(Deadline deadline) {
  const MPI_Comm world = MPI_COMM_WORLD;
  return mpi_communicator(&world, deadline);
}

Communicator mpi_communicator(const void* handle, Deadline deadline) {
  return comm_internal::mpi_communicator(handle, comm_internal::kFragmentBytes,
                                         comm_internal::kTreeBytes, deadline);
}

namespace comm_internal {

Communicator mpi_communicator(const void* handle, size_t fragment_bytes, size_t tree_bytes,
                              Deadline deadline) {
  initialize();
  const MPI_Comm original = *static_cast<const MPI_Comm*>(handle);
  return Communicator(std::make_shared<Mpi>(original, fragment_bytes, tree_bytes, deadline));
}

}  // namespace comm_internal
}  // namespace tilestone
