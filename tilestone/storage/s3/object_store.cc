#include "tilestone/storage/object_store.h"

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/config.h"
#include "tilestone/storage/s3/credentials.h"
#include "tilestone/storage/s3/store.h"

namespace tilestone {

void check_store_url(const std::string& url) {
  if (!registered_opener(url)) s3::parse_url(url);
}

void set_spare_certificates(const std::string& file) { s3::set_spare_bundle(file); }

std::string object_store_problem() {
  try {
    const s3::Config config = s3::config_from(s3::process_environment());
    s3::find_credentials(config.environment, config.region, config.ca_bundle);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::shared_ptr<Storage> object_store(const std::string& url) {
  if (const StoreOpener open = registered_opener(url)) return open(url);
  return s3::s3_store(s3::parse_url(url));
}

}  // namespace tilestone
