// The stores that the program has registered.
#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <mutex>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/storage/object_store.h"

namespace tilestone {
namespace {

constexpr std::string_view kS3 = "s3";

struct Openers {
  std::mutex mutex;
  std::map<std::string, StoreOpener, std::less<>> by_scheme;
};

Openers& openers() {
  static Openers& all = *new Openers;  // never destroyed, as what uses it
  return all;
}

// "": the path is no URL.
std::string_view scheme_of(std::string_view path) {
  const size_t end = path.find("://");
  return end == std::string_view::npos ? "" : path.substr(0, end);
}

StoreOpener opener_of(std::string_view scheme) {
  if (scheme.empty()) return nullptr;
  Openers& all = openers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_scheme.find(scheme);
  return found == all.by_scheme.end() ? nullptr : found->second;
}

bool is_scheme_character(char each) {
  return std::islower(static_cast<unsigned char>(each)) != 0 || each == '+' || each == '-' ||
         std::isdigit(static_cast<unsigned char>(each)) != 0;
}

}  // namespace

void register_store(const std::string& scheme, StoreOpener open) {
  if (scheme.size() < 2 || !std::ranges::all_of(scheme, is_scheme_character) || scheme == kS3 ||
      scheme == "file") {
    throw Error(ErrorCode::kInvalidArgument,
                "\"" + scheme +
                    "\" can't be the scheme of a store: at least two of a-z, 0-9, + and -, and "
                    "neither \"s3\" nor \"file\"");
  }
  Openers& all = openers();
  const std::lock_guard lock(all.mutex);
  all.by_scheme.insert_or_assign(scheme, std::move(open));
}

StoreOpener registered_opener(const std::string& url) {
  const std::string_view scheme = scheme_of(url);
  StoreOpener open = opener_of(scheme);
  if (!open) return open;
  const std::string_view rest = std::string_view(url).substr(scheme.size() + 3);
  if (rest.empty() || !is_literal(rest)) {
    throw Error(ErrorCode::kInvalidArgument,
                "this is not of the form " + std::string(scheme) + "://bucket/prefix")
        .with_file(url)
        .with_hint(kLiteralHint);
  }
  return open;
}

bool is_literal(std::string_view prefix) {
  std::string between = "/" + std::string(prefix);
  if (!between.ends_with('/')) between += '/';
  return std::ranges::none_of(
             std::array{"//", "/./", "/../"},
             [&](const char* part) { return between.find(part) != std::string::npos; }) &&
         between.find('\0') == std::string::npos;
}

bool is_store_url(const std::string& path) {
  return scheme_of(path) == kS3 || opener_of(scheme_of(path)) != nullptr;
}

}  // namespace tilestone
