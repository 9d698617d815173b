// The command line: `tilestone ls | inspect | verify | cat | publish | gc`. Each subcommand is one
// file.
#pragma once

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// Exit codes. A script can rely on them.
inline constexpr int kOk = 0;
inline constexpr int kDamaged = 1;  // the checkpoint is damaged, or differs from what was expected
inline constexpr int kUsage = 2;    // wrong arguments, unknown key, unsupported operation
inline constexpr int kIoFailed =
    3;                             // no checkpoint, save under way, disk error, output not written
inline constexpr int kUnsafe = 4;  // content that could do harm if it were trusted

// The exit code for an error.
int exit_code(ErrorCode code);

// Runs one command and returns its exit code. Prints results to standard output, errors to standard
// error.
int run(int argc, const char* const* argv);

}  // namespace tilestone::cli
