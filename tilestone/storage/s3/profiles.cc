#include "tilestone/storage/s3/profiles.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace {

// The text before a comment, which begins a line or follows a space.
std::string_view without_comment(std::string_view line) {
  for (size_t at = 0; at < line.size(); ++at) {
    const bool begins = at == 0 || line[at - 1] == ' ' || line[at - 1] == '\t';
    if (begins && (line[at] == '#' || line[at] == ';')) return line.substr(0, at);
  }
  return line;
}

std::string section_name(std::string_view text) {
  std::string out;
  for (const char c : trimmed(text)) {
    const bool space = c == ' ' || c == '\t';
    if (!space) out += c;
    if (space && out.back() != ' ') out += ' ';
  }
  return out;
}

// Of the file that the variable names, or of one in ~/.aws. That may be another user's, as in
// containers: it is empty then.
Sections read_sections(const Environment& environment, const char* name, const char* file) {
  const std::string home = setting(environment, "HOME");
  if (std::string path = setting(environment, name); !path.empty()) {
    if (path.starts_with("~/")) path.replace(0, 1, home);
    return parse_sections(read_text(path).value_or(""));
  }
  if (home.empty()) return {};
  try {
    return parse_sections(read_text(fmt::format("{}/.aws/{}", home, file)).value_or(""));
  } catch (const Error& error) {
    if (error.sys_errno() != EACCES) throw;
    return {};
  }
}

const Section* find(const Sections& sections, const std::string& name) {
  const auto found = sections.find(name);
  return found == sections.end() ? nullptr : &found->second;
}

void add_service(const Sections& sections, Section& profile) {
  const auto name = profile.find("services");
  if (name == profile.end()) return;
  const Section* const services = find(sections, "services " + name->second);
  if (services == nullptr) return;
  const auto endpoint = services->find("s3.endpoint_url");
  if (endpoint != services->end()) profile["services.endpoint_url"] = endpoint->second;
}

}  // namespace

Environment process_environment() {
  Environment out;
  for (char** each = environ; each != nullptr && *each != nullptr; ++each) {
    const std::string_view text = *each;
    const size_t equals = text.find('=');
    if (equals != std::string_view::npos)
      out.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  out.emplace("HOME", home_directory());  // if it is not set
  return out;
}

std::string setting(const Section& section, const std::string& name) {
  const auto found = section.find(name);
  return found == section.end() ? "" : found->second;
}

Sections parse_sections(std::string_view text) {
  Sections out;
  Section* section = nullptr;
  std::string parent;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = without_comment(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::string_view words = trimmed(line);
    if (words.size() > 2 && words.front() == '[' && words.back() == ']') {
      section = &out[section_name(words.substr(1, words.size() - 2))];
      parent.clear();
      continue;
    }
    const size_t equals = words.find('=');
    if (section == nullptr || equals == std::string_view::npos) continue;
    const std::string name = lower_case(trimmed(words.substr(0, equals)));
    const std::string_view value = trimmed(words.substr(equals + 1));
    const bool nested = (line.front() == ' ' || line.front() == '\t') && !parent.empty();
    if (!nested) parent = value.empty() ? name : "";
    (*section)[nested ? parent + "." + name : name] = value;
  }
  return out;
}

Profile read_profile(const Environment& environment) {
  const std::string chosen = setting(environment, "AWS_PROFILE");
  Profile profile = {.name = chosen.empty() ? "default" : chosen};
  const Sections config = read_sections(environment, "AWS_CONFIG_FILE", "config");
  const Sections credentials =
      read_sections(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials");
  const Section* in_config = find(config, "profile " + profile.name);
  if (in_config == nullptr && profile.name == "default") in_config = find(config, "default");
  const Section* const in_credentials = find(credentials, profile.name);
  if (!chosen.empty() && in_config == nullptr && in_credentials == nullptr) {
    throw Error(ErrorCode::kNotFound,
                fmt::format("AWS_PROFILE names the profile {}, which neither AWS's config file nor "
                            "its credentials file has",
                            profile.name));
  }
  if (in_config != nullptr) profile.config = *in_config;
  if (in_credentials != nullptr) profile.credentials = *in_credentials;
  add_service(config, profile.config);
  return profile;
}

std::optional<std::string> read_text(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  std::string text;
  try {
    text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  } catch (const std::ios_base::failure&) {  // of a directory
    file.setstate(std::ios::badbit);
  }
  if (file.bad() || !file.is_open()) {
    throw Error(ErrorCode::kIo, "a file of AWS's settings can't be read")
        .with_file(path)
        .with_errno(errno);
  }
  return text;
}

}  // namespace tilestone::s3
