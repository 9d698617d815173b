// One bucket of S3, or of a store that speaks its API.
//
// Each call begins a request and returns a Pending; its wait() returns the result or throws Error.
// Requests are sent again, after growing pauses, until the call's deadline: 409, 429, 5xx (but
// 501), resets, timeouts. Expired credentials, a wrong clock and another region are corrected once.
//
// Errors name operation, bucket, key, status, the store's code and request id: kNotFound for 404,
// kTimeout with the last problem, kUnsupported for 501, else kIo; 403 has EACCES and says which
// permission is needed. kInvalidArgument for keys with control characters and for an empty ETag as
// a condition.
//
// **A lost answer.** An attempt whose answer is lost, or is an error, may have been executed, then
// or later; gateways, too, send requests again. So if a conditional write finds its condition
// broken, the stored bytes are compared with those that it has sent; equal ones are its own.
// Writers that compete for a name must write different bytes (an id).
//
// An answer that was cut or lacks what S3 always says (an ETag, a length, the range asked for, the
// code of a 404) is no result: three of them are an error.
//
// Memory that a request sends or fills must stay until wait() has returned or the Pending is
// destroyed, which ends the request first. A Client and its calls are thread-safe. It must outlive
// its Pendings. A forked child may use an inherited Client, which gets connections of its own, but
// not a Pending.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/per_process.h"
#include "tilestone/storage/condition.h"
#include "tilestone/storage/s3/answers.h"
#include "tilestone/storage/s3/config.h"
#include "tilestone/storage/s3/http.h"

namespace tilestone::s3 {

class Attempts;
struct Request;

struct Answer {
  HttpAnswer http;
  bool repeated = false;  // an earlier attempt may have been executed
};
Answer wait_for(Attempts& attempts);
void give_up(Attempts& attempts) noexcept;

template <typename T>
class Pending {
 public:
  using Finish = std::function<T(const Answer&)>;
  Pending(std::shared_ptr<Attempts> attempts, Finish finish)
      : attempts_(std::move(attempts)), finish_(std::move(finish)) {}
  ~Pending() {
    if (attempts_ != nullptr) give_up(*attempts_);
  }
  Pending(Pending&&) noexcept = default;

  // Once.
  T wait() {
    const std::shared_ptr<Attempts> attempts = std::exchange(attempts_, nullptr);
    return finish_(wait_for(*attempts));
  }

 private:
  std::shared_ptr<Attempts> attempts_;
  Finish finish_;
};

// Called when a request has ended, on the client's thread, so it must not wait for another one: its
// Pending's wait() then returns soon.
using AtEnd = std::function<void()>;

// ETags, which are the tags of conditions, are as the store gives them, with their quotes.
using MaybeEtag = std::optional<std::string>;

struct ObjectInfo {
  uint64_t size = 0;
  std::string etag;
  std::optional<std::chrono::system_clock::time_point> modified;
  std::optional<std::chrono::duration<double>> age;  // by the store's clock, in whole seconds
  std::string crc32;  // x-amz-checksum-crc32, if the store has kept one and it was asked for
};

// The first bytes of an object.
struct Beginning {
  Bytes bytes;
  uint64_t size = 0;  // of the whole object
  std::string etag;
};

struct ListRequest {
  std::string prefix = "";
  std::string delimiter = "";
  std::string next = "";  // of the page before
  int page = 1000;        // keys on a page, at most 1,000
};

inline constexpr size_t kMaxKeysToRemove = 1000;
inline constexpr uint64_t kMaxCopied = uint64_t{5} << 30;

class Client {
 public:
  Client(Config config, std::string bucket);
  ~Client();

  // The new ETag; nullopt: the condition does not hold. crc32: of the whole body, checked by the
  // store. The parts of the body are sent one after the other.
  Pending<MaybeEtag> put(const std::string& key, std::vector<ByteView> body,
                         const Condition& condition, std::optional<uint32_t> crc32,
                         const Deadline& deadline);
  // Of a condition that does not hold: whether the store refuses to put under it. It may have none.
  Pending<bool> refuses(const std::string& key, std::vector<ByteView> body,
                        const Condition& condition, const Deadline& deadline);

  // Fills `into`, which must not be empty, with the bytes from `offset` on, and returns the
  // object's ETag. With an `etag` the object must have it, else kMismatch. kIo if the object is
  // shorter.
  Pending<std::string> get(const std::string& key, uint64_t offset, MutableByteView into,
                           const std::string& etag, const Deadline& deadline, AtEnd at_end = {});
  // At most `most` bytes (up to kMaxAnswer) from the object's begin; nullopt: there is none.
  Pending<std::optional<Beginning>> get_beginning(const std::string& key, const Deadline& deadline,
                                                  size_t most = kMaxAnswer);
  // nullopt: there is none. checksum: asks for crc32, for which KMS wants permission to decrypt.
  Pending<std::optional<ObjectInfo>> head(const std::string& key, bool checksum,
                                          const Deadline& deadline);

  // Makes the object a copy of another one, of at most kMaxCopied bytes, in any bucket that the
  // store has. Returns its ETag; nullopt: there is no other one, or copying it was not completed.
  Pending<MaybeEtag> copy(const std::string& from_bucket, const std::string& from,
                          const std::string& key, const Deadline& deadline);

  // In the store's order, which is that of the keys' bytes on AWS.
  Pending<ListPage> list(const ListRequest& request, const Deadline& deadline);

  // At most kMaxKeysToRemove. Absent keys count as removed. Returns those that were refused, but
  // not for now only.
  Pending<std::vector<NotDeleted>> remove(const std::vector<std::string>& keys,
                                          const Deadline& deadline);
  // False: the object has another ETag. An absent one counts as removed, because the answer to the
  // attempt that has removed it may have been lost. It looks first, because many stores ignore the
  // condition: there another object is removed if it is put between the look and the removal.
  Pending<bool> remove_if(const std::string& key, const std::string& etag,
                          const Deadline& deadline);
  // The same without the look.
  Pending<bool> remove_own(const std::string& key, const std::string& etag,
                           const Deadline& deadline);

  // The id of a new upload, the only one of its key if an answer was lost: such a second one is
  // aborted. checksums: each part will have a CRC-32.
  Pending<std::string> begin_upload(const std::string& key, bool checksums,
                                    const Deadline& deadline);
  // The ETag of the part. Numbers are 1 to 10,000; all parts but the last have at least 5 MiB.
  Pending<std::string> upload_part(const std::string& key, const std::string& id, int number,
                                   std::vector<ByteView> body, std::optional<uint32_t> crc32,
                                   const Deadline& deadline, AtEnd at_end = {});
  // The object's ETag; nullopt: the condition does not hold. Parts in order, with sizes. Error
  // (kNotFound) if there is no such upload and the object is another one: AWS says so too after a
  // conflict with another conditional write, and the upload must then begin anew.
  Pending<MaybeEtag> complete(const std::string& key, const std::string& id,
                              std::vector<Part> parts, const Condition& condition,
                              const Deadline& deadline);
  // False: there was no such upload.
  Pending<bool> abort(const std::string& key, const std::string& id, const Deadline& deadline);
  // Unfinished uploads of keys that begin with `prefix`. `after`: of the page before.
  Pending<UploadPage> uploads(const std::string& prefix, const std::optional<Upload>& after,
                              const Deadline& deadline);

 private:
  struct Live;
  std::shared_ptr<Attempts> start(Request request, const Deadline& deadline, AtEnd at_end = {});
  MaybeEtag stored(const std::string& key, const std::vector<ByteView>& body,
                   const Deadline& deadline);
  MaybeEtag completed(const std::string& key, const std::vector<Part>& parts,
                      const Deadline& deadline);
  Request put_request(const std::string& key, const std::vector<ByteView>& body,
                      const Condition& condition) const;
  void expect_none(const std::string& key, const Deadline& deadline);
  void abort_others(const std::string& key, const std::string& id, const Deadline& deadline);

  const Config config_;
  const std::string bucket_;
  const std::unique_ptr<PerProcess<Live>> live_;
};

}  // namespace tilestone::s3
