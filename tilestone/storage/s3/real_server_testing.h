// For tests: real servers that speak S3's API, from PyPI (tools/requirements.txt), on free ports.
//
// What they have of S3, as found with SeaweedFS 4.48 and rclone 1.75.2:
//
//                                      SeaweedFS                     rclone serve s3
// If-None-Match, If-Match on PUT       412, also for an absent key   ignored
// the same on CompleteMultipartUpload  412                           ignored
// If-Match on DELETE                   412, also for an absent key   ignored
// If-Match on GET                      412                           ignored
// CRC-32 of a PUT or a part            BadDigest                     ignored
// CRC-32s of parts in a completion     BadDigest                     ignored
// x-amz-checksum-crc32 of HEAD         as sent; "CRC-N" of uploads   as sent; none of uploads
// a second completion                  200 and the same ETag         NoSuchUpload
// ETag of a completion                 the object's                  another than the object's
// parts of less than 5 MiB             EntityTooSmall                accepted
// order of a list                      by path: "a/b" before "a-b"   by bytes
// "a//b", "/a"                         literal, but never listed     400
// "a/../b", "./a", "a/./b"             400                           400
// "a" and "a/b"                        both                          500, again and again
// a name of 300 bytes between slashes  400 KeyTooLongError           500, again and again
// a "folder" without objects           stays a common prefix         is gone
//
// Writers that compete for one key with conditions get about one answer per second from SeaweedFS.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tilestone/storage/s3/config.h"

namespace tilestone::s3 {

class RealServer {
 public:
  enum class Kind { kSeaweed, kRclone, kRcloneTls };
  // Starts it over a fresh folder, and waits until it answers.
  explicit RealServer(Kind kind);
  ~RealServer();  // kills it and removes the folder
  RealServer(const RealServer&) = delete;
  RealServer& operator=(const RealServer&) = delete;

  std::string url() const;
  std::string certificate() const;  // of kRcloneTls: a file
  // Short pauses, and keys that the server knows: AKIDTESTS with SECRETTESTS. SeaweedFS also knows
  // AKIDTESTS2 with SECRETTESTS2.
  Config config() const;
  Config config_for(const std::string& endpoint) const;
  void create_bucket(const std::string& name) const;

  void kill_now();  // SIGKILL
  void start();     // over the same folder and port

 private:
  std::vector<std::string> command() const;
  void spawn();
  bool answers() const;

  const Kind kind_;
  const std::filesystem::path folder_;
  std::vector<int> ports_;
  pid_t process_ = -1;
};

// One for all tests of this process; it ends with the process.
RealServer& seaweed();
RealServer& rclone();

}  // namespace tilestone::s3
