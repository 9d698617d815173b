// A message is the communicator's generation (see mpi.cc) and one byte for its kind, followed by
// the notice, or by the call's number and the error.
#include "tilestone/comm/mpi_notices_internal.h"

#include <string>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone::comm_internal {
namespace {

constexpr size_t kMaxAborted = 16;

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ErrorCode::kRankFailed, std::string(what) + ": " + text);
}

void keep(std::map<uint64_t, Error>& aborted, uint64_t call, const Error& why) {
  aborted.emplace(call, why);
  if (aborted.size() > kMaxAborted) aborted.erase(aborted.begin());
}

}  // namespace

void MpiNotices::open(MPI_Comm comm, int tag, int rank, int size, uint64_t generation) {
  comm_ = comm;
  tag_ = tag;
  rank_ = rank;
  size_ = size;
  generation_ = generation;
}

ByteWriter MpiNotices::begin_message(NoticeKind kind) const {
  ByteWriter writer;
  writer.u64(generation_);
  writer.u8(static_cast<uint8_t>(kind));
  return writer;
}

void MpiNotices::post(std::vector<Notice> notices) {
  for (const Notice& notice : notices) {
    ByteWriter writer = begin_message(NoticeKind::kNotice);
    writer.raw(notice.bytes);
    send(notice.rank, std::move(writer).take());
  }
  progress();
}

std::vector<Notice> MpiNotices::take() {
  progress();
  std::vector<Notice> newest;
  for (auto& [rank, bytes] : std::exchange(notices_, {})) {
    newest.push_back({rank, std::move(bytes), {}});
  }
  return newest;
}

void MpiNotices::abort(uint64_t call, const Error& why) {
  keep(aborted_, call, why);
  ByteWriter writer = begin_message(NoticeKind::kAbort);
  writer.u64(call);
  writer.raw(why.encode());
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) send(rank, writer.bytes());
  }
  progress();
}

void MpiNotices::check(uint64_t call) const {
  if (const auto why = aborted_.find(call); why != aborted_.end()) throw Error(why->second);
}

void MpiNotices::send(int to, Bytes bytes) {
  Message& message = leaving_.emplace_back(Message{to, std::move(bytes), MPI_REQUEST_NULL});
  check_mpi(MPI_Isend(message.bytes.data(), static_cast<int>(message.bytes.size()), MPI_BYTE, to,
                      tag_, comm_, &message.request),
            "MPI could not send a notice");
}

void MpiNotices::progress() {
  std::erase_if(leaving_, [](Message& message) {
    int sent = 0;
    check_mpi(MPI_Test(&message.request, &sent, MPI_STATUS_IGNORE), "MPI could not send a notice");
    return sent != 0;
  });
  receive();
  while (!coming_.empty()) {
    Message& message = coming_.front();
    int came = 0;
    check_mpi(MPI_Test(&message.request, &came, MPI_STATUS_IGNORE),
              "MPI could not receive a notice");
    if (!came) return;
    const Message whole = std::move(message);
    coming_.pop_front();
    deliver(whole.peer, whole.bytes);
  }
}

void MpiNotices::receive() {
  while (true) {
    int found = 0, size = 0;
    MPI_Message handle = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, tag_, comm_, &found, &handle, &status),
              "MPI could not check for notices");
    if (!found) return;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &size), "MPI could not check for notices");
    Message& message = coming_.emplace_back(
        Message{status.MPI_SOURCE, Bytes(static_cast<size_t>(size)), MPI_REQUEST_NULL});
    check_mpi(MPI_Imrecv(message.bytes.data(), size, MPI_BYTE, &handle, &message.request),
              "MPI could not receive a notice");
  }
}

void MpiNotices::deliver(int from, const Bytes& bytes) {
  ByteReader reader(bytes, "notice of rank " + std::to_string(from));
  if (reader.u64() != generation_) return;
  heard_of_(from);
  if (static_cast<NoticeKind>(reader.u8()) == NoticeKind::kAbort) {
    const uint64_t call = reader.u64();
    keep(aborted_, call, Error::decode(reader.raw(reader.remaining())));
  } else {
    const ByteView notice = reader.raw(reader.remaining());
    notices_.insert_or_assign(from, Bytes(notice.begin(), notice.end()));
  }
}

void MpiNotices::release() {
  new std::list<Message>(std::move(leaving_));
  new std::list<Message>(std::move(coming_));
}

}  // namespace tilestone::comm_internal
