// S3 as a Storage: the objects of a bucket whose keys begin with a prefix and "/". Names are the
// rest of the key, as it is; keys that are no file names are not listed.
//
// What differs from a disk: a file exists when it is complete (WritableFile::sync()); claims are
// leases (storage/lease.h); settle() has nothing to do. The first put with a condition finds out,
// with its scratch file, which conditions the bucket has. Where it has no put if absent, one looks
// first, and of two at the same time both succeed. Calls without a deadline, and puts whose
// deadline never passes, end after a minute.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/s3/config.h"
#include "tilestone/storage/storage.h"

namespace tilestone::s3 {

struct Url {
  std::string bucket;
  std::string prefix;  // without a slash at its end; "": the whole bucket
};
// Of "s3://bucket/prefix". Error(kInvalidArgument) if it has no bucket, or a
// prefix that is not literal (is_literal()).
Url parse_url(const std::string& url);

// Does not reach for the network. Stores of one bucket and one environment share their connections,
// for as long as the process lives.
std::shared_ptr<Storage> s3_store(const Url& url);  // as this process's environment says
std::shared_ptr<Storage> s3_store(const Url& url, Config config);  // with connections of its own

}  // namespace tilestone::s3
