// The subcommands: a struct with the parsed arguments, and a function that does the work and
// returns the exit code. The functions throw tilestone::Error. The arguments are declared to the
// parser in run.cc, the only file that includes the parser's header, because that header compiles
// slowly.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/cli/runs.h"

namespace tilestone::cli {

struct LsOptions {
  Targets at;  // the parser puts all words here; ls() moves those that are patterns
  std::vector<std::string> patterns = {};
  bool json = false;
  bool tree = false;
  int depth = -1;     // levels of the tree; -1: all
  bool wide = false;  // don't shorten keys to the terminal's width
};
int ls(const LsOptions& options);

struct InspectOptions {
  std::string path;
  bool follow_links = false;  // read files through any symbolic link
  std::string key;
  bool json = false;
  bool all = false;
  bool wide = false;
};
int inspect(const InspectOptions& options);

struct VerifyOptions {
  Targets at;
  bool json = false;
  bool all = false;  // also each item that a truncated file lacks
  bool wide = false;
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
int cat(const CatOptions& given);

struct ConvertCommand {
  std::string source;
  std::string target;
  bool follow_links = false;
  std::string format;
  std::string dialect;
  std::vector<std::string> keys;
  std::string only;
  std::vector<std::string> rename;  // "REGEX=NAME"
  std::string rename_file;
  std::string cast;
  std::string optimizer;
  std::string layout;
  uint64_t shard_bytes = 0;
  bool dry_run = false;
  bool json = false;
};
int convert(const ConvertCommand& command);

struct DiffCommand {
  std::string a;
  std::string b;
  bool follow_links = false;
  std::vector<std::string> keys;
  std::vector<std::string> rename;  // of A's keys
  double atol = 0;
  bool wide = false;
  bool json = false;
};
int diff(const DiffCommand& command);

struct DeltaCommand {
  std::string a;
  std::string b;
  std::string path;
  bool follow_links = false;
  bool json = false;
};
int delta(const DeltaCommand& command);

struct DuOptions {
  std::string path;
  bool follow_links = false;
  std::vector<std::string> patterns;
  std::string by = "prefix";  // "prefix", "rank", "file"
  int depth = 2;
  bool by_name = false;  // otherwise the largest first
  bool wide = false;
  bool json = false;
};
int du(const DuOptions& options);

struct LayoutOptions {
  std::string path;
  bool follow_links = false;
  std::string output = "layout.html";  // "-": standard output
};
int layout(const LayoutOptions& options);

struct GcOptions {
  Targets at;
  bool remove = false;
  // Also the files of a checkpoint that has lost only its hidden files; with `line`, also the line
  // that the run continues from.
  bool force = false;
  bool wide = false;
  bool abandon = false;  // first end an unpublished save whose ranks are dead
  std::string save_id;   // the save to abandon, if there are several
  bool json = false;
  std::string line;  // of a run: list or remove the steps of this line instead
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
