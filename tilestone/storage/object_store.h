// The object stores that this build knows, by their URLs: "s3://bucket/prefix", if it has S3.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

// Whether the path is the URL of a kind of store that a build may know.
bool is_store_url(const std::string& path);
// Error(kUnsupported) if this build does not know the store, and kInvalidArgument if the URL names
// no bucket, or has "." or ".." between slashes.
void check_store_url(const std::string& url);
// Checks the URL; the store itself is reached later. Errors of its configuration are thrown.
std::shared_ptr<Storage> object_store(const std::string& url);
// A file of certificates of authorities, for a system that has none.
void set_spare_certificates(const std::string& file);
// Why no object store can be used: no credentials are found, or this build knows none. "": one can.
// May ask endpoints of the network.
std::string object_store_problem();

}  // namespace tilestone
