#include "tilestone/comm/comm_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>
#include <random>
#include <string>

#include "tilestone/base/error.h"

namespace tilestone::comm_testing {
namespace {

using std::chrono::duration;

constexpr duration<double> kPlenty{120};  // seconds; for messages that must arrive
constexpr duration<double> kShort{0.1};   // seconds; for messages that can't arrive
constexpr size_t kMiB = size_t{1} << 20;

// The size in bytes of the message from one rank to another.
using SizeOf = std::function<size_t(int from, int to)>;

// The message from rank `from` to rank `to` in operation number `operation`.
Bytes message(uint64_t operation, int from, int to, size_t size) {
  uint64_t state = operation * 1000003 + static_cast<uint64_t>(from * 1009 + to) + 1;
  Bytes out(size);
  for (size_t offset = 0; offset < size; offset += sizeof state) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(out.data() + offset, &state, std::min(sizeof state, size - offset));
  }
  return out;
}

std::string describe(const Bytes& bytes) {
  return std::to_string(bytes.size()) + " bytes" +
         (bytes.empty() ? "" : ", first " + std::to_string(static_cast<int>(bytes.front())));
}

void expect_bytes(const Bytes& found, const Bytes& expected, const std::string& what) {
  const bool same =
      found.size() == expected.size() &&
      (found.empty() || std::memcmp(found.data(), expected.data(), found.size()) == 0);
  EXPECT_TRUE(same) << what << ": found " << describe(found) << ", expected " << describe(expected);
}

void expect_all_bytes(const std::vector<Bytes>& found, const std::vector<Bytes>& expected,
                      const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t i = 0; i < found.size(); ++i) {
    expect_bytes(found[i], expected[i], what + ", from rank " + std::to_string(i));
  }
}

// The kinds of operations.
enum class CollectiveKind { kGather, kScatter, kBroadcast, kAllToAll };
constexpr CollectiveKind kKinds[] = {CollectiveKind::kGather, CollectiveKind::kScatter,
                                     CollectiveKind::kBroadcast, CollectiveKind::kAllToAll};

// Runs one operation and checks its result. The bytes that are sent depend on `number`.
class Step {
 public:
  Step(const Communicator& comm, CollectiveKind kind, uint64_t number, SizeOf size_of,
       Deadline deadline = Deadline::after(kPlenty))
      : comm_(comm),
        kind_(kind),
        number_(number),
        size_of_(std::move(size_of)),
        deadline_(deadline) {}

  void run() const {
    switch (kind_) {
      case CollectiveKind::kGather:
        return expect_all_bytes(comm_.gather(to(0), deadline_),
                                comm_.is_coordinator() ? all_to(0) : std::vector<Bytes>(),
                                what("gather"));
      case CollectiveKind::kScatter:
        return expect_bytes(
            comm_.scatter(comm_.is_coordinator() ? to_all() : std::vector<Bytes>(), deadline_),
            from(0), what("scatter"));
      case CollectiveKind::kBroadcast:
        return expect_bytes(
            comm_.broadcast(comm_.is_coordinator() ? sent(0, 0) : Bytes(), deadline_), sent(0, 0),
            what("broadcast"));
      case CollectiveKind::kAllToAll:
        return expect_all_bytes(comm_.all_to_all(to_all(), deadline_), all_to(comm_.rank()),
                                what("all_to_all"));
    }
  }

  // The error that run() throws, if any.
  std::optional<Error> error() const {
    try {
      run();
    } catch (const Error& error) {
      return error;
    }
    return std::nullopt;
  }

 private:
  Bytes sent(int from, int to) const { return message(number_, from, to, size_of_(from, to)); }
  Bytes to(int rank) const { return sent(comm_.rank(), rank); }
  Bytes from(int rank) const { return sent(rank, comm_.rank()); }
  std::vector<Bytes> to_all() const {
    std::vector<Bytes> out;
    for (int rank = 0; rank < comm_.size(); ++rank) out.push_back(to(rank));
    return out;
  }
  std::vector<Bytes> all_to(int rank) const {
    std::vector<Bytes> out;
    for (int source = 0; source < comm_.size(); ++source) out.push_back(sent(source, rank));
    return out;
  }
  std::string what(const char* name) const {
    return std::string(name) + " " + std::to_string(number_) + ", at rank " +
           std::to_string(comm_.rank()) + " of " + std::to_string(comm_.size());
  }

  const Communicator& comm_;
  CollectiveKind kind_;
  uint64_t number_;
  SizeOf size_of_;
  Deadline deadline_;
};

size_t uneven(int from, int to) {
  return static_cast<size_t>(from) * 777 + static_cast<size_t>(to % 3) * 5000;
}

size_t random_size(std::mt19937_64& random) {
  constexpr size_t kBounds[] = {1, 2, 100, 5000, 70000, 300000};
  return random() % kBounds[random() % std::size(kBounds)];
}

Step random_step(const Communicator& comm, std::mt19937_64& random, uint64_t number) {
  const CollectiveKind kind = kKinds[random() % std::size(kKinds)];
  const size_t a = random_size(random), b = random_size(random);
  return Step(comm, kind, number, [a, b](int from, int to) {
    return (static_cast<size_t>(from) * a + static_cast<size_t>(to) * b) % 300000;
  });
}

// Whether the rank can fail if `absent` is missing. Sets `surely` to whether it must fail.
bool needs(CollectiveKind kind, int rank, int absent, bool* surely) {
  switch (kind) {
    case CollectiveKind::kGather:
      *surely = rank == 0;
      return rank == 0 || absent == 0;
    case CollectiveKind::kScatter:
    case CollectiveKind::kBroadcast:
      *surely = absent == 0;
      return rank == 0 || absent == 0;
    case CollectiveKind::kAllToAll:
      *surely = true;
  }
  return true;
}

// Whether the text contains the rank as a number of its own.
bool names(const std::string& text, int rank) {
  const std::string number = std::to_string(rank);
  for (size_t at = text.find(number); at != std::string::npos; at = text.find(number, at + 1)) {
    const size_t end = at + number.size();
    const bool starts = at == 0 || std::isdigit(static_cast<unsigned char>(text[at - 1])) == 0;
    const bool ends =
        end == text.size() || std::isdigit(static_cast<unsigned char>(text[end])) == 0;
    if (starts && ends) return true;
  }
  return false;
}

// Checks that the error names `absent`. On a busy machine it may name other late ranks too.
void expect_names(const std::optional<Error>& error, int absent, bool surely,
                  const std::string& what) {
  if (!error) {
    EXPECT_FALSE(surely) << what << ": no error";
    return;
  }
  EXPECT_EQ(error->code(), ErrorCode::kTimeout) << what << ": " << error->what();
  EXPECT_TRUE(names(error->message(), absent)) << what << ": " << error->what();
}

void check_missing_in(const Communicator& comm, CollectiveKind kind, int absent, uint64_t number,
                      const Rendezvous& rendezvous) {
  const auto same_size = [](int, int) { return size_t{3000}; };
  const std::string what = "kind " + std::to_string(static_cast<int>(kind)) + ", absent " +
                           std::to_string(absent) + ", at rank " + std::to_string(comm.rank());
  rendezvous();
  if (comm.rank() != absent) {
    bool surely = false;
    const bool may_fail = needs(kind, comm.rank(), absent, &surely);
    const Deadline deadline = Deadline::after(may_fail ? kShort : kPlenty);
    const auto error = Step(comm, kind, number, same_size, deadline).error();
    if (may_fail) {
      expect_names(error, absent, surely, what);
    } else {
      EXPECT_FALSE(error) << what << ": " << error->what();
    }
  }
  rendezvous();
  if (comm.rank() == absent) {
    // Too late: it may succeed or fail, depending on the messages that the others have sent.
    Step(comm, kind, number, same_size, Deadline::after(kShort)).error();
  }
  rendezvous();
  Step(comm, kind, number + 1000, uneven).run();
}

template <typename Call>
void expect_invalid(Call call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error was thrown, expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.message(), text);
  }
}

}  // namespace

void check_every_operation(const Communicator& comm) {
  const std::vector<SizeOf> sizes = {[](int, int) { return size_t{0}; },
                                     [](int, int) { return size_t{1}; },
                                     [](int, int) { return kMiB; }, uneven};
  uint64_t number = 0;
  for (const SizeOf& size_of : sizes) {
    for (CollectiveKind kind : kKinds) Step(comm, kind, ++number, size_of).run();
  }
}

void check_random_operations(const Communicator& comm, uint64_t seed, int count) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < count; ++i) random_step(comm, random, static_cast<uint64_t>(i)).run();
}

void check_missing_caller(const Communicator& comm, int absent, const Rendezvous& rendezvous) {
  uint64_t number = 0;
  for (CollectiveKind kind : kKinds) {
    check_missing_in(comm, kind, absent, number++, rendezvous);
  }
  check_random_operations(comm, 20, 20);
}

void check_bad_arguments(const Communicator& comm) {
  const Deadline deadline = Deadline::after(kPlenty);
  const int n = comm.size();
  const std::string parts =
      std::to_string(n + 1) + " parts, expected one for each of " + std::to_string(n);
  expect_invalid([&] { comm.all_to_all(std::vector<Bytes>(n + 1), deadline); },
                 "all_to_all: found " + parts + " ranks");
  Step(comm, CollectiveKind::kAllToAll, 7, uneven).run();
}

void check_two_groups(const Communicator& row, const Communicator& column, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < 100; ++i) {
    random_step(i % 2 == 0 ? row : column, random, i).run();
  }
}

}  // namespace tilestone::comm_testing
