#include <algorithm>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/comm/mpi_transfer_internal.h"

namespace tilestone::comm_internal {
namespace {

// Calls visit(offset, bytes) for each fragment of a payload of `size` bytes.
template <typename Visit>
void for_each_fragment(size_t size, size_t fragment_bytes, Visit visit) {
  for (size_t offset = 0; offset < size; offset += fragment_bytes) {
    visit(offset, static_cast<int>(std::min(fragment_bytes, size - offset)));
  }
}

}  // namespace

void MpiTransfer::check(int code, const char* what) const {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ErrorCode::kRankFailed, std::string(route_.operation_name) + ": MPI could not " +
                                          what + " rank " + std::to_string(peer()) + ": " +
                                          std::string(text, static_cast<size_t>(length)))
      .with_rank(peer());
}

bool MpiTransfer::requests_complete(const char* what) {
  int flag = 0;
  check(
      MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &flag, MPI_STATUSES_IGNORE),
      what);
  return flag != 0;
}

MpiSend::MpiSend(const MpiRoute& route, std::shared_ptr<const Bytes> payload)
    : MpiTransfer(route), payload_(std::move(payload)) {
  header_ = {route.operation, payload_->size()};
}

void MpiSend::start() {
  const auto post = [this](const void* from, int bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Isend(from, bytes, MPI_BYTE, route_.peer, route_.tag, route_.comm, &request),
          "send to");
    requests_.push_back(request);
  };
  post(&header_, sizeof header_);
  for_each_fragment(payload_->size(), route_.fragment_bytes,
                    [&](size_t offset, int bytes) { post(payload_->data() + offset, bytes); });
}

bool MpiSend::complete() { return requests_complete("send to"); }

void MpiReceive::start() {
  requests_.assign(1, MPI_REQUEST_NULL);
  check(MPI_Irecv(&header_, sizeof header_, MPI_BYTE, route_.peer, route_.tag, route_.comm,
                  requests_.data()),
        "receive from");
}

void MpiReceive::start_payload() {
  if (header_.operation != route_.operation) {
    throw Error(ErrorCode::kInternal,
                std::string(route_.operation_name) + ": rank " + std::to_string(peer()) +
                    " sent a message of operation " + std::to_string(header_.operation) +
                    ", expected operation " + std::to_string(route_.operation))
        .with_rank(peer());
  }
  payload_.resize(header_.size);
  requests_.clear();
  for_each_fragment(payload_.size(), route_.fragment_bytes, [&](size_t offset, int bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Irecv(payload_.data() + offset, bytes, MPI_BYTE, route_.peer, route_.tag, route_.comm,
                    &request),
          "receive from");
    requests_.push_back(request);
  });
}

bool MpiReceive::complete() {
  if (!header_came_) {
    if (!requests_complete("receive from")) return false;
    header_came_ = true;
    start_payload();
  }
  return requests_complete("receive from");
}

}  // namespace tilestone::comm_internal
