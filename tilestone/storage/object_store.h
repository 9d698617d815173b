// The object stores that this process knows, by their URLs: "s3://bucket/prefix", if the build has
// S3, and those of schemes that the program has registered.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tilestone/storage/storage.h"

namespace tilestone {

// Opens the prefix that a URL names; may be called often, and from any thread.
using StoreOpener = std::function<std::shared_ptr<Storage>(const std::string& url)>;
// From now on the URLs "scheme://..." are places. Error(kInvalidArgument) for a scheme that can't
// be given away. A second call for a scheme replaces its opener.
void register_store(const std::string& scheme, StoreOpener open);
// Null: for no such URL. Error(kInvalidArgument) as of check_store_url().
StoreOpener registered_opener(const std::string& url);

// Whether no part between slashes is ".", ".." or empty, and no byte is NUL. Some servers refuse
// these, and some keep the object under another key, which no listing of this prefix shows.
bool is_literal(std::string_view prefix);
inline constexpr const char* kLiteralHint =
    "nothing between two slashes, \".\" and \"..\" are refused, because servers change such keys";

// Of a store that answers a request after some 10 ms.
inline constexpr ReadCosts kStoreReadCosts{
    .gap_bytes = 1u << 20, .request_bytes = 1u << 20, .open_bytes = 2u << 20};

// Whether the path is the URL of a kind of store that a build may know, or of a registered one.
bool is_store_url(const std::string& path);
// Error(kUnsupported) if this build does not know the store, and kInvalidArgument if the URL names
// no bucket, or is not literal.
void check_store_url(const std::string& url);
// Checks the URL; the store itself is reached later. Errors of its configuration are thrown.
std::shared_ptr<Storage> object_store(const std::string& url);
// A file of certificates of authorities, for a system that has none.
void set_spare_certificates(const std::string& file);
// Why S3 can't be used: no credentials are found, or this build knows none. "": one can.
// May ask endpoints of the network.
std::string object_store_problem();

}  // namespace tilestone
