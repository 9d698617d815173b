// The subcommands: a struct with the parsed arguments, and a function that does the work and
// returns the exit code. The functions throw tilestone::Error. The arguments are declared to the
// parser in run.cc, the only file that includes the parser's header, because that header compiles
// slowly.
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
  bool repair = false;  // first rewrite what is damaged from copies
};
int verify(const VerifyOptions& options);

struct CatOptions {
  std::string path;
  bool follow_links = false;
  std::string key;
  std::string slice;
  std::string npy;
  bool common = false;  // print the common state; `key` is empty then
  bool all = false;
  bool json = false;
};
int cat(const CatOptions& options);

struct GcOptions {
  std::string path;
  bool follow_links = false;
  bool remove = false;
  bool force = false;    // also the files of a checkpoint that has lost only its hidden files
  bool abandon = false;  // first end an unpublished save whose ranks are dead
  std::string save_id;   // the save to abandon, if there are several
  bool json = false;
};
int gc(const GcOptions& options);

struct PublishCommand {
  std::string path;
  bool follow_links = false;
  std::string save_id;  // the save to publish, if there are several
  bool list = false;    // only list the unpublished saves
  bool json = false;    // list them as JSON
};
int publish(const PublishCommand& command);

}  // namespace tilestone::cli
