// The command line: `tilestone ls | inspect | verify | cat | gc`. Each subcommand is one file.
#pragma once

namespace tilestone::cli {

// Exit codes. A script can rely on them.
inline constexpr int kOk = 0;
inline constexpr int kDamaged = 1;   // the checkpoint is damaged, or differs from what was expected
inline constexpr int kUsage = 2;     // wrong words, a key that is not there, what can't be done
inline constexpr int kIoFailed = 3;  // nothing there, no permission, disk error, output not written
inline constexpr int kUnsafe = 4;    // content that could do harm if it were believed

// Runs one command and returns its exit code; prints to standard output, errors to standard error.
int run(int argc, const char* const* argv);

}  // namespace tilestone::cli
