// Conversions whose target is one file.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tilestone/engine/run/options.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Makes a hidden directory beside the location, calls `write` with it and with the file's name, and
// moves the file that `write` has made there, durable, to the location; `write` returns its name in
// the directory. The directory is that of a save in a sibling (commit/sibling.cc), so what a killed
// process leaves is found and removed by the next conversion and by gc. After a failure nothing is
// left. Error(kAlreadyExists) if something exists at the location; kUnsupported if no file can be
// there.
using WriteFile =
    std::function<std::string(const std::shared_ptr<Storage>& directory, const std::string& name)>;
void make_one_file(const Location& location, const WriteFile& write);
// The same with a folder that `write` has made.
void make_folder(const Location& location, const WriteFile& write);

}  // namespace tilestone::engine
