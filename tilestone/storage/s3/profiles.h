// AWS's shared files: `~/.aws/config` and `~/.aws/credentials`.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace tilestone::s3 {

using Environment = std::map<std::string, std::string>;  // a snapshot of variables
Environment process_environment();

// Settings of one section. A setting under another one is named "s3.addressing_style".
using Section = std::map<std::string, std::string>;
// Of a section or the environment. "": not set.
std::string setting(const Section& section, const std::string& name);
// By the text between the brackets, with single spaces: "default", "profile a", "services b".
using Sections = std::map<std::string, Section>;
// Lines that are neither a section nor a setting are skipped.
Sections parse_sections(std::string_view text);

// The profile that AWS_PROFILE names, or "default", from both files.
struct Profile {
  std::string name;
  Section config;       // with `endpoint_url` of its `services` section as "services.endpoint_url"
  Section credentials;  // of the credentials file
};
// Error(kNotFound) if AWS_PROFILE is set and neither file has the profile, kIo if a file can't be
// read. A file that does not exist is empty, and one of ~/.aws that this user may not read.
Profile read_profile(const Environment& environment);

// The text of a file; nullopt: it does not exist. Error(kIo) if it can't be read.
std::optional<std::string> read_text(const std::string& path);

}  // namespace tilestone::s3
