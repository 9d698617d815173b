// The subcommands: what their words say, and what does the work and returns the exit code. Errors
// leave as tilestone::Error. The words themselves are declared in run.cc, the one file that sees
// the parser's header, which takes a compiler longer than all of a subcommand.
#pragma once

#include <string>
#include <vector>

namespace tilestone::cli {

struct LsOptions {
  std::string path;
  bool follow_links = false;  // read files through any symbolic link
  std::vector<std::string> patterns;
  bool json = false;
  bool by_size = false;
  bool tensors_only = false;
  bool objects_only = false;
};
int ls(const LsOptions& options);

struct InspectOptions {
  std::string path;
  bool follow_links = false;
  std::string key;
  bool json = false;
  bool all = false;
};
int inspect(const InspectOptions& options);

struct VerifyOptions {
  std::string path;
  bool follow_links = false;
  int threads = 0;
  bool json = false;
  bool repair = false;  // write what is damaged anew from copies first
};
int verify(const VerifyOptions& options);

struct CatOptions {
  std::string path;
  bool follow_links = false;
  std::string key;
  std::string slice;
  std::string npy;
  bool common = false;  // the common state; there is no key then
  bool all = false;
  bool json = false;
};
int cat(const CatOptions& options);

struct GcOptions {
  std::string path;
  bool follow_links = false;
  bool remove = false;
  bool force = false;    // also what is left of a checkpoint that has only lost its hidden files
  bool abandon = false;  // first ends an unpublished save whose ranks are dead
  std::string save_id;   // which one, where there are several
  bool json = false;
};
int gc(const GcOptions& options);

struct PublishCommand {
  std::string path;
  bool follow_links = false;
  std::string save_id;  // which one, where there are several
  bool list = false;    // only says what is unpublished
  bool json = false;    // likewise
};
int publish(const PublishCommand& command);

}  // namespace tilestone::cli
