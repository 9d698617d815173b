// For tests: real servers that speak S3's API, from PyPI (tools/requirements.txt), on free ports.
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
